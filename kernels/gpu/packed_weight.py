"""Matrices of codes of 4 or 8 bits in a GPU's memory, as `packed_matmul` takes them.

Shapes: N outputs, K inputs, G groups of inputs, R rows, B blocks of a row. Codes are unsigned.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Inputs whose codes of 4 bits lie together: byte i has the code of input i, and above it that of input i + 32.
UNIT = 64


class _Blocks(NamedTuple):
    """Blocks of `group` inputs as files or loaders have them: a scale, a shift if there is any, then the codes.

    shift: what it is: added after the scale, or taken off before. pairs: the codes of neighbours share a byte, else
    those of the first half of the block lie below those of the second. is_signed: codes of 8 bits are.
    """

    bits: int
    group: int
    scale: torch.dtype
    shift: Literal["none", "added", "zero"] = "none"
    pairs: bool = False
    is_signed: bool = False


#: By their types in `eventlm.kernels.cpu.native.PACKED_TYPES`.
_BLOCKS = {
    "Q4_0": _Blocks(4, 32, torch.float16),
    "Q4_1": _Blocks(4, 32, torch.float16, "added"),
    "Q8_0": _Blocks(8, 32, torch.float16, is_signed=True),
    **{
        f"I{bits}_{group}": _Blocks(bits, group, torch.float32, "zero", pairs=True)
        for bits in (4, 8)
        for group in (32, 128)
    },
}
#: The types of blocks that can be taken in.
KINDS = frozenset(_BLOCKS)


class PackedWeight(NamedTuple):
    """A matrix [N, K] of numbers `scale * (code - shift)`, or `scale * code + shift` if `is_added`.

    codes: uint8, [N, K] with 8 bits, else [N, K / 2] in whole units, see `UNIT`. scales, shifts: [N, G] of any floating
    type; without shifts, it is half of what the bits hold.
    """

    codes: Tensor
    scales: Tensor
    shifts: Tensor | None
    bits: int
    group: int
    num_in: int
    is_added: bool

    @property
    def num_out(self) -> int:
        """Outputs."""
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        """What it takes of the memory."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.shifts is None else self.shifts.nbytes)

    def load(self, kind: str, first_row: int, blocks_RN: Tensor) -> None:
        """Take in rows of blocks of one of `KINDS`, uint8 [R, bytes], from `first_row` on."""
        codes, scales, shifts = _unpacked(kind, blocks_RN.to(self.codes.device), self.num_in)
        if self.bits == 4:
            units = pad(codes, (0, -self.num_in % UNIT)).unflatten(1, (-1, 2, UNIT // 2))
            codes = (units[:, :, 0] | units[:, :, 1] << 4).flatten(1)
        rows = slice(first_row, first_row + len(blocks_RN))
        self.codes[rows], self.scales[rows] = codes, scales
        if self.shifts is not None and shifts is not None:
            self.shifts[rows] = shifts


def empty_packed(kind: str, num_out: int, num_in: int, device: torch.device | str) -> PackedWeight:
    """Room for a matrix of one of `KINDS`, of a multiple of 32 inputs."""
    blocks = _BLOCKS[kind]
    num_groups = -(-num_in // blocks.group)
    code_bytes = num_in if blocks.bits == 8 else -(-num_in // UNIT) * UNIT // 2
    return PackedWeight(
        torch.empty(num_out, code_bytes, dtype=torch.uint8, device=device),
        torch.empty(num_out, num_groups, dtype=blocks.scale, device=device),
        None if blocks.shift == "none" else torch.empty(num_out, num_groups, dtype=torch.float16, device=device),
        blocks.bits,
        blocks.group,
        num_in,
        blocks.shift == "added",
    )


def _unpacked(kind: str, blocks_RN: Tensor, num_in: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [R, K], uint8, scales [R, G] and shifts."""
    bits, group, scale_dtype, shift, pairs, is_signed = _BLOCKS[kind]
    scale_end = scale_dtype.itemsize
    code_start = scale_end + (0 if shift == "none" else 2)
    blocks_RBN = blocks_RN.unflatten(1, (-1, code_start + group * bits // 8))
    scales = blocks_RBN[..., :scale_end].contiguous().view(scale_dtype)[..., 0]
    shifts = None
    if shift != "none":
        shifts = blocks_RBN[..., scale_end:code_start].contiguous().view(torch.float16)[..., 0]
    codes = blocks_RBN[..., code_start:]
    if bits == 4:
        halves = codes & 15, codes >> 4
        codes = torch.stack(halves, dim=-1).flatten(-2) if pairs else torch.cat(halves, dim=-1)
    elif is_signed:
        codes = codes ^ 128
    return codes.flatten(1)[:, :num_in], scales, shifts
