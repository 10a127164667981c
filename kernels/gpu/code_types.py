"""The types of codes that a GPU's product takes. Loads no torch: the control plane sizes a model's weights by them."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: Inputs whose codes of 4 bits lie together: byte i has the code of input i, and above it that of input i + 32.
UNIT = 64


class CodeType(NamedTuple):
    """A group of inputs is `group` codes under a scale, and blocks in files are of one group each: first the scale,
    then the shift if there is any, then the codes.

    scale: float16, float32, or the exponent of a power of two (E8M0). shift: added after the scale, or taken off
    before. pairs: the codes of neighbours share a byte of a block, else those of its first half lie below those of the
    second. is_signed: codes of 8 bits are. is_float: codes of 4 bits are floats (E2M1).
    """

    bits: Literal[4, 8]
    group: int
    scale: Literal["float16", "float32", "power"]
    shift: Literal["none", "added", "zero"] = "none"
    pairs: bool = False
    is_signed: bool = False
    is_float: bool = False


#: By their names in `eventlm.kernels.cpu.native.PACKED_TYPES`.
CODE_TYPES = {
    "Q4_0": CodeType(4, 32, "float16"),
    "Q4_1": CodeType(4, 32, "float16", "added"),
    "Q8_0": CodeType(8, 32, "float16", is_signed=True),
    "MXFP4": CodeType(4, 32, "power", is_float=True),
    "I4_32": CodeType(4, 32, "float32", "zero", pairs=True),
    "I4_128": CodeType(4, 128, "float32", "zero", pairs=True),
    "I8_32": CodeType(8, 32, "float32", "zero", pairs=True),
    "I8_128": CodeType(8, 128, "float32", "zero", pairs=True),
}
#: Bytes of a scale in a GPU's memory, where powers of two are bfloat16, and of a shift.
_SCALE_BYTES = {"float16": 2, "float32": 4, "power": 2}
_SHIFT_BYTES = 2


def row_bytes(code_type: CodeType, num_in: int) -> int:
    """Bytes of the codes of an output in a GPU's memory."""
    return num_in if code_type.bits == 8 else -(-num_in // UNIT) * UNIT // 2


def code_bytes(kind: str, num_out: int, num_in: int) -> int:
    """Bytes of a matrix of one of CODE_TYPES in a GPU's memory."""
    code_type = CODE_TYPES[kind]
    group_bytes = _SCALE_BYTES[code_type.scale] + (_SHIFT_BYTES if code_type.shift != "none" else 0)
    return num_out * (row_bytes(code_type, num_in) + -(-num_in // code_type.group) * group_bytes)
