"""Which matrices are multiplied by as codes, and the types of the codes. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from eventlm.kernels.cpu.native import MULTIPLIED_TOGETHER, PACKED_TYPES
from eventlm.kernels.gpu.code_types import CODE_TYPES
from eventlm.models.program import FLOAT32_WEIGHTS, WeightKey
from eventlm.models.spec import DTYPE_BYTES, ModelSpec
from eventlm.models.weights.decoder_weights import EMBEDDING, model_weights
from eventlm.models.weights.stored_weights import StoredWeight, WeightFile

#: Inputs of a group of the codes that numbers are rounded to.
GROUP = 32
#: Inputs of an int8 matrix that are rotated together. They are padded to a multiple of it.
INT8_BLOCK = 64
#: Those of 4 bits, and of 8 for what is sensitive: a vocabulary, and keys and values, which all later tokens see. The
#: latter are few, and were seen to cost as much as all other matrices together if they had 4 bits.
_IN_4_BITS, _IN_8_BITS = "Q4_1", "Q8_0"
_SENSITIVE = ("embedding", "inputs_embedding", "lm_head", "key", "value")


class MatrixFormat(NamedTuple):
    """How a matrix lies in memory: of an output `block_bytes` for as many inputs, which cannot be cut apart."""

    block_inputs: int
    block_bytes: int

    def num_bytes(self, num_out: int, num_in: int) -> int:
        """Bytes of a matrix, those of a part of a block in proportion."""
        return num_out * num_in * self.block_bytes // self.block_inputs


class MatrixFormats(NamedTuple):
    """How the matrices of a decoder lie in memory. granule: inputs that are better left together in all of them.

    others: of those that are codes.
    """

    usual: MatrixFormat = MatrixFormat(1, 2)
    granule: int = 32
    others: Mapping[WeightKey, MatrixFormat] = MappingProxyType({})

    def of(self, key: WeightKey) -> MatrixFormat:
        """The format of a matrix."""
        return self.others.get(key, self.usual)


def matrix_formats(types: Mapping[WeightKey, str], dtype_name: str, quantization: str = "none") -> MatrixFormats:
    """The formats of matrices of these types (see `matrix_types`), and of others by the resolved dtype."""
    others = {key: MatrixFormat(*PACKED_TYPES[kind][1:]) for key, kind in types.items()}
    if quantization == "int8":
        return MatrixFormats(MatrixFormat(1, 1), INT8_BLOCK, others)
    return MatrixFormats(MatrixFormat(1, DTYPE_BYTES[dtype_name]), GROUP, others)


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


def packed_types(files: Iterable[WeightFile]) -> dict[WeightKey, str]:
    """The matrices that the compiled decoder multiplies by as codes, and their types, one of `PACKED_TYPES`."""
    types: dict[WeightKey, str] = {}
    for file in files:
        for weight in file.weights:
            is_codes = len(weight.shape) == 2 and weight.num_bytes and not weight.interleaved
            is_kept = is_codes and weight.dtype in PACKED_TYPES and weight.key.name not in FLOAT32_WEIGHTS
            types[weight.key] = weight.dtype if is_kept and _has_whole_blocks(weight) else ""
        for matrix in file.quantized:
            kind = "" if matrix.columns else matrix.scheme.packed_type(matrix.num_in)
            types |= dict.fromkeys(matrix.weights, kind)
    # Those of one product stay codes only together. A layer without gates has `up` alone.
    return {
        key: kind
        for key, kind in types.items()
        if kind
        and key.name not in FLOAT32_WEIGHTS
        and all(types.get(key._replace(name=name)) != "" for name in _multiplied_with(key.name))
    }


def _has_whole_blocks(weight: StoredWeight) -> bool:
    size = PACKED_TYPES[weight.dtype].block_inputs
    return all(columns.start % size == 0 and columns.stop % size == 0 for columns in weight.columns)


def gpu_types(files: Iterable[WeightFile], model: ModelSpec) -> dict[WeightKey, str]:
    """The matrices that GPUs multiply by as codes, and their types, of `CODE_TYPES`: those of a product, or of a
    layer's experts, if all are of one type. An embedding is looked up there, and never stays codes.
    """
    types = packed_types(files)
    products: dict[tuple[str, int, bool], set[str]] = {}
    for key in model_weights(model):
        if key.kind == "weight":
            products.setdefault(_product(key), set()).add(types.get(key, ""))
    return {
        key: kind
        for key, kind in types.items()
        if kind in CODE_TYPES and key != EMBEDDING and len(products[_product(key)]) == 1
    }


def _product(key: WeightKey) -> tuple[str, int, bool]:
    """What the weights of a product have in common, and those of all experts of a layer."""
    return next(iter(_multiplied_with(key.name)), key.name), key.layer, key.expert >= 0


def _multiplied_with(name: str) -> tuple[str, ...]:
    return next((names for names in MULTIPLIED_TOGETHER if name in names), ())
