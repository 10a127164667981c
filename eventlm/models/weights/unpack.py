"""What the tensors of a quantized matrix hold: numbers, or codes for the compiled decoder.

Shapes: O outputs, I inputs, R rows of outputs, G groups of inputs, B blocks of inputs. Codes are unsigned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from eventlm.errors import CheckpointError
from eventlm.kernels.gpu.packed_weight import POWERS
from eventlm.models.quantized.scheme import AWQ_ORDER
from eventlm.models.weights.quantized_matrices import QuantizedMatrix
from eventlm.models.weights.slices import Ranges

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E8M0": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NO_POWER = 255
_LOW_HALVES = 0x0F0F0F0F
#: The code of E4M3 that is no number, without its sign, and what the compiled decoder's floats are multiplied by.
_NO_FLOAT, _FLOAT_FACTOR = 127, 256


class UnpackedMatrix:
    """A matrix [O, I]. `data`: the bytes of each part, which must live as long as this does.

    Of one that is cut, O and I are what is there to unpack it from, and C the inputs that are wanted of these.
    """

    def __init__(self, matrix: QuantizedMatrix, data: Mapping[str, Tensor]) -> None:
        self._matrix, self._scheme = matrix, matrix.scheme
        self._parts = {
            name: data[name].view(_DTYPES[part.dtype]).view(part.wanted_shape) for name, part in matrix.parts.items()
        }
        order = self._parts.get("g_idx" if matrix.scheme.layout == "gptq" else "weight_g_idx")
        self._order_I = order.long() if order is not None and matrix.scheme.has_order else None
        self._is_exact = matrix.scheme.is_exact or matrix.scheme.layout == "fp4"
        self._codes = self._find_codes()
        self._scales = self._find_scales()
        self._zeros_OG = self._find_zeros()

    def values(self, rows: Sequence[int]) -> Tensor:
        """Some outputs as numbers [R, C]: in the dtype of the scales, or float32."""
        num_in, index = self._matrix.num_in, _index(rows)
        scales_RG = self._scales_of(rows)
        dtype = torch.float32 if self._is_exact else scales_RG.dtype
        match self._scheme.layout:
            case "fp8":
                numbers_RI = self._codes[index].view(torch.float8_e4m3fn).to(dtype)
            case "fp4":
                numbers_RI = _FP4[_apart(self._codes[index])[:, :num_in].long()]
            case _:
                codes_RI = self._codes[index]
                if self._scheme.bits == 4:
                    codes_RI = _apart(codes_RI)
                numbers_RI = (codes_RI[:, :num_in].short() - self._spread(self._zeros_OG[index])).to(dtype)
        return some_columns(numbers_RI * self._spread(scales_RG.to(dtype)), self._matrix.columns)

    def blocks(self, kind: str, rows: Sequence[int]) -> Tensor:
        """Some outputs as the compiled decoder takes them, uint8 [R, bytes] of this type of `PACKED_TYPES`.

        A block is a scale, a zero and its codes, two of 4 bits in a byte, the even one low. Floats have no zero, and
        their scale is 256 times what it is; MXFP4 is as ggml has it.
        """
        num_in, index = self._matrix.num_in, _index(rows)
        if kind == "MXFP4":
            codes_RBI = _apart(self._codes[index]).unflatten(1, (-1, 32))
            bytes_RBI = codes_RBI[..., :16] | codes_RBI[..., 16:] << 4
            return torch.cat((self._scales[index][..., None], bytes_RBI), dim=-1).flatten(1)
        size = int(kind.partition("_")[2])
        num_blocks, code_bytes = -(-num_in // size), size * self._scheme.bits // 8
        codes_RI = self._codes[index][:, : num_in * self._scheme.bits // 8]
        codes_RBI = pad(codes_RI, (0, num_blocks * code_bytes - codes_RI.shape[1])).unflatten(1, (num_blocks, -1))
        scales_RB = self._of_blocks(self._scales_of(rows), size, num_blocks).float()
        if self._scheme.layout == "fp8":
            # What is no number spoils its block.
            is_spoilt_RB = (codes_RBI & _NO_FLOAT).amax(-1) == _NO_FLOAT
            scales_RB = torch.where(is_spoilt_RB, torch.nan, scales_RB * _FLOAT_FACTOR)
            return torch.cat((scales_RB[..., None].view(torch.uint8), codes_RBI), dim=-1).flatten(1)
        zeros_RB = self._of_blocks(self._zeros_OG[index], size, num_blocks).half()
        heads = scales_RB[..., None].view(torch.uint8), zeros_RB[..., None].view(torch.uint8)
        return torch.cat((*heads, codes_RBI), dim=-1).flatten(1)

    def _of_blocks(self, values_RG: Tensor, size: int, num_blocks: int) -> Tensor:
        if values_RG.shape[1] == 1:
            return values_RG.expand(-1, num_blocks).contiguous()
        return values_RG.repeat_interleave(self._scheme.group[1] // size, dim=1)[:, :num_blocks].contiguous()

    def _find_codes(self) -> Tensor:
        """Of each output its codes, two of 4 bits in a byte, the even one low."""
        match self._scheme.layout:
            case "awq":
                return self._awq_codes()
            case "gptq":
                return self._parts["qweight"].t().contiguous().view(torch.uint8)
            case "bytes":
                return self._parts["weight"].view(torch.uint8) ^ 128
            case "fp8":
                return self._parts["weight"].view(torch.uint8)
        return self._parts["weight_packed"].flatten(1).view(torch.uint8)

    def _awq_codes(self) -> Tensor:
        """The same of words of outputs."""
        # Bytes of two inputs become bytes of one output each: the lower halves, and the higher ones.
        even, odd = self._parts["qweight"][0::2], self._parts["qweight"][1::2]
        halves = (even & _LOW_HALVES) | (odd & _LOW_HALVES) << 4, (even >> 4 & _LOW_HALVES) | (odd & ~_LOW_HALVES)
        codes_OI = torch.empty(self._matrix.num_out, len(even), dtype=torch.uint8)
        for half, words_IO in enumerate(halves):
            bytes_OI = words_IO.t().contiguous().view(torch.uint8)
            for number in range(4):
                codes_OI[AWQ_ORDER[2 * number + half] :: 8] = bytes_OI[:, number::4]
        return codes_OI

    def _find_scales(self) -> Tensor:
        """[O, G], or a row for some outputs together."""
        if "scales" in self._parts:
            return self._parts["scales"].t().contiguous()
        scales = self._parts["weight_scale"]
        if scales.dtype == torch.uint8 and self._scheme.layout == "fp8":
            scales = POWERS[scales.long()]
        return scales if scales.dim() == 2 else scales.reshape(-1, 1)

    def _scales_of(self, rows: Sequence[int]) -> Tensor:
        """[R, G]."""
        if self._scheme.layout == "fp4":
            return POWERS[self._scales[_index(rows)].long()]
        numbers_R = torch.tensor(rows)
        if len(self._scales) != self._matrix.num_out:
            numbers_R = numbers_R // (self._scheme.group[0] or self._matrix.num_out)
        return self._scales[numbers_R]

    def _find_zeros(self) -> Tensor:
        """[O, G], or [O, 1] where it is the same for all of an output's groups."""
        scheme, num_out = self._scheme, self._matrix.num_out
        if not scheme.has_zeros:
            return torch.tensor(1 << (scheme.bits - 1), dtype=torch.int16).expand(num_out, 1)
        if "qzeros" in self._parts:
            words = self._parts["qzeros"]
            zeros_GO = _in_awq_order(words) if scheme.layout == "awq" else _of_words(words, scheme.bits).flatten(1)
            return zeros_GO[:, :num_out].t().short() + scheme.zero_shift
        zeros = self._parts["weight_zero_point"]
        if scheme.layout == "packed":
            return _of_words(zeros.t(), scheme.bits).flatten(1)[:, :num_out].t().short()
        return zeros.reshape(-1, 1 if zeros.dim() < 2 else zeros.shape[1]).short().expand(num_out, -1) + 128

    def _spread(self, values_RG: Tensor) -> Tensor:
        """The group's value for each input, [R, I], or [R, 1] where there is one group."""
        if values_RG.shape[1] == 1:
            return values_RG
        if self._order_I is not None:
            return values_RG[:, self._order_I]
        return values_RG.repeat_interleave(self._scheme.group[1], dim=1)[:, : self._matrix.num_in]


def _index(rows: Sequence[int]) -> slice | Tensor:
    """What a tensor is indexed with for some of its rows, without a copy where they are evenly apart."""
    return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else torch.tensor(rows)


def some_columns(values: Tensor, columns: Ranges) -> Tensor:
    """Those of the last dimension. Empty: all."""
    if not columns:
        return values
    pieces = [values[..., each.start : each.stop] for each in columns]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def check_values(matrix: QuantizedMatrix, data: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for values that no such matrix has, naming the file and the tensor.

    data: the bytes of some parts.
    """
    for name, raw in data.items():
        part = matrix.parts[name]
        values = raw.view(_DTYPES[part.dtype]).view(part.shape)
        if problem := _problem(matrix, name, values):
            raise CheckpointError(f"{part.path}: tensor {part.name} {problem}; download the model again")


def _problem(matrix: QuantizedMatrix, name: str, values: Tensor) -> str:
    scheme, shape = matrix.scheme, [matrix.num_out, matrix.num_in]
    groups = scheme.num_groups(matrix.num_in)
    match name:
        case "scales" | "weight_scale":
            is_power = values.dtype == torch.uint8
            is_wrong = (values == _NO_POWER).any() if is_power else (~values.isfinite()).any()
            return "has NaN or infinity" if is_wrong else ""
        case "g_idx" | "weight_g_idx":
            least, most = int(values.min()), int(values.max())
            if not 0 <= least <= most < groups:
                return f"has numbers from {least} to {most}, and there are {groups} groups"
            in_order_I = torch.arange(matrix.num_in) // (scheme.group[1] or matrix.num_in)
            if not scheme.has_order and not torch.equal(values.long(), in_order_I):
                return "has groups in another order than config.json, which has desc_act false"
        case "qzeros":
            if int(_of_words(values, scheme.bits).max()) + scheme.zero_shift >= 1 << scheme.bits:
                return f"has a zero of {1 << scheme.bits}, which {scheme.bits} bits do not hold"
        case "weight_shape":
            return "" if values.tolist() == shape else f"is {values.tolist()}, by config.json it is {shape}"
        case "bias":
            return "is not zero, and by config.json there is no bias" if values.any() else ""
    return ""


def _of_words(words: Tensor, bits: int) -> Tensor:
    """The codes of words of 32 bits [..., W], uint8 [..., W, 32 / bits]."""
    # Flat, for words that are a column are contiguous without lying one after the other by their strides.
    bytes_of = words.flatten().view(torch.uint8).view(*words.shape, 4)
    return _apart(bytes_of) if bits == 4 else bytes_of


def _in_awq_order(words: Tensor) -> Tensor:
    """[..., 8 W] of words [..., W]."""
    codes = _of_words(words, 4)
    places = torch.empty(8, dtype=torch.long)
    places[list(AWQ_ORDER)] = torch.arange(8)
    return codes[..., places].flatten(-2)


def _apart(pairs: Tensor) -> Tensor:
    """The codes of bytes that have two each, the lower one first."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
