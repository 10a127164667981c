"""The weights of a decoder in safetensors files, found and checked by the headers. Loads no torch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsHeader,
    TensorInfo,
    find_shards,
    read_header,
    read_index,
    tensors_by_offset,
)
from eventlm.models.program import WeightKey
from eventlm.models.quantized.scheme import PARTS
from eventlm.models.spec import ModelSpec, TensorNames
from eventlm.models.weights.decoder_weights import EMBEDDING, HEAD, model_weights
from eventlm.models.weights.quantized_matrices import Parts, whole_names
from eventlm.models.weights.stored_weights import STORED_DTYPES, StoredWeight, WeightFile
from eventlm.models.weights.tensor_names import checkpoint_tensors, tensor_name
from eventlm.models.weights.tensor_rows import row_runs

#: End of the names of buffers in old checkpoints. They are not weights.
_OLD_BUFFER = "rotary_emb.inv_freq"
_UNQUANTIZED = "take the model in bfloat16 or float16 (--quantization int8 quantizes it while it loads)"
#: After the name of a tensor with all experts of a layer: parts of layouts that cannot be read.
_UNREAD_STACKS: tuple[str, ...] = (".weight_packed", "_packed", ".qweight", "_scale")
#: Ends of the names of tensors that only quantized checkpoints have.
QUANTIZED_PARTS = (
    *(part for part in PARTS if part not in ("weight", "bias")),
    *("weight_scale_inv", "input_scale", "blocks", "absmax", "quant_map", "SCB", "quant_state.bitsandbytes__nf4"),
    "biases",
)


class _Found(NamedTuple):
    """A tensor of a file, and its name by `checkpoint_tensors`."""

    name: str
    role: str
    info: TensorInfo


def find_in_safetensors(folder: Path, model: ModelSpec) -> list[WeightFile]:
    """The safetensors files of a folder with the decoder's weights. Raises CheckpointError like `find_weights`."""
    headers = {path: read_header(path) for path in find_shards(folder)}
    found = {path: _tensors_of(header, model) for path, header in headers.items()}
    names = _names_in(found.values(), model)
    shapes, known = model_weights(model), checkpoint_tensors(model, names)
    missing = dict(known)
    embedding, head = (tensor_name(key, model, names) for key in (EMBEDDING, HEAD))
    has_embedding = any(tensor.role == embedding for tensors in found.values() for tensor in tensors)
    is_head_taken = not (model.tie_word_embeddings and has_embedding)
    parts = None
    if model.quantized:
        _check_stacks(found, known, names)
        parts = Parts(model.quantized, _stacks_of_rows(known, names))
    files = []
    for path, tensors in found.items():
        weights: list[StoredWeight] = []
        for tensor in tensors:
            role = tensor.role
            if role == head and not is_head_taken:
                continue
            if role == head and model.tie_word_embeddings:
                role = embedding
            is_plain = role in known and tensor.info.dtype in STORED_DTYPES
            if parts and not is_plain and parts.take(path, headers[path], tensor.name, role):
                continue
            if role not in missing:
                raise CheckpointError(f"{path}: tensor {tensor.name} {_why_unknown(role, known, model)}")
            its_shapes = {key: shapes[key] for key in missing.pop(role)}
            weights += _rows(path, tensor, its_shapes, headers[path].data_start, model, names.stacking)
        files.append(WeightFile(path, headers[path].stamp, weights))
    if parts:
        matrices = parts.matrices(missing, shapes, model, names.stacking)
        files = [file._replace(quantized=matrices.get(file.path, ())) for file in files]
    if missing:
        name = next(iter(missing))
        more = f" ({len(missing)} are)" if len(missing) > 1 else ""
        raise CheckpointError(f"{_where(folder, name)}: tensor {name} is missing{more}; download the model again")
    return files


def _check_stacks(found: Mapping[Path, list[_Found]], known: Mapping[str, list[WeightKey]], names: TensorNames) -> None:
    """Raise CheckpointError for quantized experts of a layer in one tensor, in a layout that cannot be read."""
    if not names.stacking:
        return
    ends = _UNREAD_STACKS
    if names.stacking == "columns":
        # Their codes may be [in, out] or [out, in], which shapes do not tell if both are equal.
        ends += (".weight",)
    unread = {f"{name}{end}" for name, keys in known.items() if keys[0].expert >= 0 for end in ends}
    for path, tensors in found.items():
        for name, role, info in tensors:
            if role in unread:
                raise CheckpointError(
                    f"{path}: tensor {name} ({info.dtype}, shape {list(info.shape)}) belongs to the quantized experts "
                    "of a layer in one tensor, in a layout that is not supported; use a checkpoint with separate "
                    "tensors for each expert"
                )


def _stacks_of_rows(known: Mapping[str, list[WeightKey]], names: TensorNames) -> set[str]:
    """The tensors that are the matrices [out, in] of all experts of a layer."""
    if names.stacking != "rows":
        return set()
    return {name for name, keys in known.items() if keys[0].expert >= 0 and keys[0].kind == "weight"}


def _names_in(found: Iterable[list[_Found]], model: ModelSpec) -> TensorNames:
    """The naming scheme that matches the most tensors."""
    roles = {tensor.role for tensors in found for tensor in tensors}
    if model.quantized:
        roles |= {whole for role in roles for whole in whole_names(role)}
    return max(
        (model.names, *model.other_names), key=lambda names: len(checkpoint_tensors(model, names).keys() & roles)
    )


def _tensors_of(header: SafetensorsHeader, model: ModelSpec) -> list[_Found]:
    """The file's tensors that belong to the decoder, in the order of their data."""
    tensors = []
    for name, info in tensors_by_offset(header):
        role = model.names.without_alias(name)
        if not name.endswith(_OLD_BUFFER) and not any(each.startswith(model.names.ignored) for each in (name, role)):
            tensors.append(_Found(name, role, info))
    return tensors


def _rows(
    path: Path,
    tensor: _Found,
    shapes: dict[WeightKey, tuple[int, ...]],
    data_start: int,
    model: ModelSpec,
    stacking: str,
) -> Iterator[StoredWeight]:
    """The weights that a tensor consists of. Raises CheckpointError if it is not of the shape that they make."""
    name, _, info = tensor
    if info.dtype not in STORED_DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {info.dtype}{_why_not(info)}")
    num_rows = sum(shape[0] for shape in shapes.values())
    keys, num_experts = list(shapes), len({key.expert for key in shapes})
    expected = [num_rows, *shapes[keys[0]][1:]]
    is_stacked = bool(stacking) and keys[0].expert >= 0
    if is_stacked:
        one = [num_rows // num_experts, *expected[1:]]
        expected = [num_experts, *(one if stacking == "rows" else reversed(one))]
    # The correction of ERNIE is a matrix of one row, a convolution has a channel in between.
    also = [1, *expected] if len(expected) == 1 else [expected[0], 1, *expected[1:]]
    may_differ = keys[0].name in ("correction", "taps")
    if list(info.shape) != expected and not (may_differ and list(info.shape) == also):
        raise CheckpointError(
            f"{path}: tensor {name} has shape {list(info.shape)}, by config.json it is {expected}; "
            "the two files are not of one model"
        )
    start, end = info.data_offsets
    offset = data_start + start
    if is_stacked and stacking == "columns":
        num_turns = len(keys) // num_experts
        for first in range(0, len(keys), num_turns):
            interleaved = tuple(keys[first : first + num_turns])
            yield StoredWeight(interleaved[0], name, info.dtype, tuple(expected[1:]), offset, interleaved=interleaved)
            offset += (end - start) // num_experts
        return
    for key, first_row, count in row_runs(shapes, model):
        shape = (count, *shapes[key][1:])
        yield StoredWeight(key, name, info.dtype, shape, offset, first_row=first_row)
        offset += (end - start) // num_rows * count


def _why_unknown(name: str, known: Container[str], model: ModelSpec) -> str:
    if name in known:
        return "is in two files"
    if name.endswith(QUANTIZED_PARTS):
        method = model.quantized
        has_none = "config.json no weights are quantized"
        if method is not None:
            has_none = f"{method.source} ({method.name}) its module has none"
        return f"belongs to quantized weights, and by {has_none}; {_UNQUANTIZED}"
    return f"is not one of {model.architecture} as config.json describes it; the two files are not of one model"


def _why_not(info: TensorInfo) -> str:
    supported = f" (supported: {', '.join(STORED_DTYPES)})"
    if info.dtype.startswith(("F8", "F4", "F6", "I8", "U8", "I4", "U4")):
        return f", as quantized weights have{supported}; {_UNQUANTIZED}"
    return f", which weights never have{supported}; download the model again"


def _where(folder: Path, name: str) -> Path:
    """The file that should hold a tensor that is missing."""
    if (folder / SINGLE_FILE).exists():
        return folder / SINGLE_FILE
    return folder / read_index(folder / INDEX_FILE).get(name, INDEX_FILE)
