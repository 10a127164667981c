"""Which matrices the compiled decoder multiplies by as codes, and the types of the codes. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable

from eventlm.models.checkpoint_weights import WeightFile, model_weights, packed_types
from eventlm.models.program import FLOAT32_WEIGHTS, WeightKey
from eventlm.models.spec import ModelSpec

#: Inputs of a group of the codes that numbers are rounded to.
GROUP = 32
#: Those of 4 bits, and of 8 for what is sensitive: a vocabulary, and keys and values, which all later tokens see. The
#: latter are few, and were seen to cost as much as all other matrices together if they had 4 bits.
_IN_4_BITS, _IN_8_BITS = "Q4_1", "Q8_0"
_SENSITIVE = ("embedding", "lm_head", "key", "value")


def matrix_types(files: Iterable[WeightFile], model: ModelSpec, quantization: str) -> dict[WeightKey, str]:
    """The matrices that are codes, and their types, of `PACKED_TYPES`. Others are bfloat16 or, if that was asked, int8.

    Without a quantization, what files have as codes stays as it is. With int4, all is rounded whose inputs are whole
    groups, also what files have as codes.
    """
    if quantization == "none":
        return packed_types(files)
    if quantization != "int4":
        return {}
    return {
        key: _IN_8_BITS if key.name in _SENSITIVE else _IN_4_BITS
        for key, shape in model_weights(model).items()
        if len(shape) == 2 and shape[1] % GROUP == 0 and key.name not in FLOAT32_WEIGHTS
    }
