"""Matrices of codes of 4 or 8 bits in a GPU's memory, as `packed_matmul` takes them.

Shapes: E experts, N outputs, K inputs, G groups of inputs, R rows, B blocks of a row. Codes are unsigned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eventlm.kernels.gpu.code_types import CODE_TYPES, UNIT, CodeType, row_bytes

_SCALES = {"float16": torch.float16, "float32": torch.float32, "power": torch.bfloat16}
#: The numbers of E8M0: exponents begin at -127, and the last code is no number.
POWERS = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), torch.nan])


class PackedWeight(NamedTuple):
    """A matrix [N, K], or those of experts [E, N, K].

    A number is `scale * (code - shift)`, or `scale * code + shift` where shifts are added; of `float` codes, it is the
    float times the scale. codes: uint8, [.., N, K] with 8 bits, else [.., N, K / 2] in whole units, see `UNIT`. scales,
    shifts: [.., N, G] of any floating type; without shifts, it is half of what the bits hold.
    """

    codes: Tensor
    scales: Tensor
    shifts: Tensor | None
    code_type: CodeType
    num_in: int

    @property
    def num_out(self) -> int:
        """Outputs."""
        return self.codes.shape[-2]

    @property
    def nbytes(self) -> int:
        """What it takes of the memory."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.shifts is None else self.shifts.nbytes)

    def of_expert(self, number: int) -> PackedWeight:
        """The matrix of one of the experts."""
        shifts = None if self.shifts is None else self.shifts[number]
        return self._replace(codes=self.codes[number], scales=self.scales[number], shifts=shifts)

    def load(self, first_row: int, blocks_RN: Tensor) -> None:
        """Take in rows of a matrix in blocks, uint8 [R, bytes], from `first_row` on."""
        codes, scales, shifts = _unpacked(self.code_type, blocks_RN.to(self.codes.device), self.num_in)
        if self.code_type.bits == 4:
            units = pad(codes, (0, -self.num_in % UNIT)).unflatten(1, (-1, 2, UNIT // 2))
            codes = (units[:, :, 0] | units[:, :, 1] << 4).flatten(1)
        rows = slice(first_row, first_row + len(blocks_RN))
        self.codes[rows], self.scales[rows] = codes, scales
        if self.shifts is not None and shifts is not None:
            self.shifts[rows] = shifts


def empty_packed(kind: str, *shape: int, device: torch.device | str) -> PackedWeight:
    """Room for matrices [.., N, K] of one of `CODE_TYPES`, K a multiple of 32."""
    code_type = CODE_TYPES[kind]
    *outer, num_in = shape
    groups = (*outer, -(-num_in // code_type.group))
    return PackedWeight(
        torch.empty(*outer, row_bytes(code_type, num_in), dtype=torch.uint8, device=device),
        torch.empty(groups, dtype=_SCALES[code_type.scale], device=device),
        None if code_type.shift == "none" else torch.empty(groups, dtype=torch.float16, device=device),
        code_type,
        num_in,
    )


def _unpacked(code_type: CodeType, blocks_RN: Tensor, num_in: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [R, K], uint8, scales [R, G] and shifts."""
    scale_end = {"float16": 2, "float32": 4, "power": 1}[code_type.scale]
    code_start = scale_end + (0 if code_type.shift == "none" else 2)
    blocks_RBN = blocks_RN.unflatten(1, (-1, code_start + code_type.group * code_type.bits // 8))
    scales = blocks_RBN[..., :scale_end].contiguous()
    if code_type.scale == "power":
        scales = POWERS.to(scales.device)[scales.long()]
    else:
        scales = scales.view(_SCALES[code_type.scale])
    shifts = None
    if code_type.shift != "none":
        shifts = blocks_RBN[..., scale_end:code_start].contiguous().view(torch.float16)[..., 0]
    codes = blocks_RBN[..., code_start:]
    if code_type.bits == 4:
        halves = codes & 15, codes >> 4
        codes = torch.stack(halves, dim=-1).flatten(-2) if code_type.pairs else torch.cat(halves, dim=-1)
    elif code_type.is_signed:
        codes = codes ^ 128
    return codes.flatten(1)[:, :num_in], scales[..., 0], shifts
