"""The weights of a decoder in a checkpoint's files, found and checked by the headers before any is read.

Loads no torch, so that a folder is checked before a worker starts.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.native import MULTIPLIED_TOGETHER, PACKED_TYPES, PANEL, packed_bytes
from eventlm.models.config import DTYPE_BYTES
from eventlm.models.gguf.source import GgufPart, GgufSource, GgufTensor, expert_tensor, read_source
from eventlm.models.program import FLOAT32_WEIGHTS, WeightKey
from eventlm.models.quantized.matrices import Parts, QuantizedMatrix, whole_names
from eventlm.models.quantized_scheme import PARTS
from eventlm.models.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    FileStamp,
    SafetensorsHeader,
    TensorInfo,
    find_shards,
    read_header,
    read_index,
    tensors_by_offset,
)
from eventlm.models.spec import (
    AttentionSpec,
    ConvolutionSpec,
    DeltaSpec,
    FeedForwardSpec,
    ModelSpec,
    RecurrentSpec,
    TensorNames,
)
from eventlm.types import ceil_div

STORED_DTYPES = ("BF16", "F16", "F32", "F64")
#: Inputs of an int8 matrix are padded to a multiple of this; each of its outputs has a scale, a float32.
INT8_BLOCK = 64
INT8_SCALE_BYTES = 4
#: With `tie_word_embeddings` they are one matrix, which a checkpoint has under either name or under both.
_EMBEDDING, _HEAD = WeightKey("embedding", 0, "weight"), WeightKey("lm_head", 0, "weight")
#: The norms of a layer, by `LayerSpec.norms`.
_NORMS = {
    "before": ("attention_norm", "feed_forward_norm"),
    "after": ("attention_out_norm", "feed_forward_out_norm"),
    "both": ("attention_norm", "attention_out_norm", "feed_forward_norm", "feed_forward_out_norm"),
    "parallel": ("attention_norm",),
}
#: End of the names of buffers in old checkpoints. They are not weights.
_OLD_BUFFER = "rotary_emb.inv_freq"
_UNQUANTIZED = "take the model in bfloat16 or float16 (--quantization int8 quantizes it while it loads)"
#: Ends of the names of tensors that only quantized checkpoints have.
_QUANTIZED_PARTS = (
    *(part for part in PARTS if part not in ("weight", "bias")),
    *("weight_scale_inv", "input_scale", "blocks", "absmax", "quant_map", "SCB", "quant_state.bitsandbytes__nf4"),
    "biases",
)


class StoredWeight(NamedTuple):
    """Where a weight lies in a file: it is the tensor `name`, or some rows of it.

    `offset` is that of its data from the start of the file, in bytes. first_row: rows of the weight that are not there
    but before it, so that a weight may lie in several pieces. interleaved: the weights whose rows are in turns
    the columns of what lies there, or the elements of a vector; empty: it is `key` as it lies. The rest is of GGUF
    files: `num_bytes` of the data if it is blocks, `head_rows` of a head if those that are rotated together are
    neighbours, what is `added` to values.
    """

    key: WeightKey
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int = 0
    head_rows: int = 0
    added: float = 0.0
    interleaved: tuple[WeightKey, ...] = ()
    first_row: int = 0


class WeightFile(NamedTuple):
    """A file of a checkpoint with the weights that the decoder takes from it, in the order of their data.

    quantized: matrices whose codes are in it; their other parts may be in other files.
    """

    path: Path
    stamp: FileStamp
    weights: list[StoredWeight]
    quantized: Sequence[QuantizedMatrix] = ()


class _Found(NamedTuple):
    """A tensor of a file, and its name by `checkpoint_tensors`."""

    name: str
    role: str
    info: TensorInfo


def model_weights(model: ModelSpec) -> dict[WeightKey, tuple[int, ...]]:
    """Each weight of the decoder and its shape: a matrix [out, in] or a vector."""
    weights: dict[WeightKey, tuple[int, ...]] = {}
    for key, shape, has_bias in _weights(model):
        weights[key] = shape
        if has_bias:
            weights[key._replace(kind="bias")] = shape[:1]
    if model.has_head_bias:
        weights[_HEAD._replace(kind="bias")] = (model.vocab_size,)
    return weights


def _weights(model: ModelSpec) -> Iterator[tuple[WeightKey, tuple[int, ...], bool]]:
    """Each weight with its shape, and whether it has a bias."""
    hidden, norm = model.hidden_size, model.norm
    yield _EMBEDDING, (model.vocab_size, hidden), False
    for number in range(model.num_layers):
        for name, shape, has_bias in _weights_of_layer(model, number):
            yield WeightKey(name, number, "weight"), shape, has_bias
        layer = model.layers[number]
        if layer.dense is not None:
            yield from _weights_of_neurons(layer.dense, hidden, number)
        if layer.experts is not None:
            for expert in range(layer.experts.num_experts):
                yield from _weights_of_neurons(layer.experts.expert, hidden, number, expert)
    if norm.has_weight:
        yield WeightKey("final_norm", 0, "weight"), (hidden,), norm.has_bias
    if not model.tie_word_embeddings:
        yield _HEAD, (model.vocab_size, hidden), False


def _weights_of_layer(model: ModelSpec, number: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """What it has beside neurons."""
    hidden, norm, layer = model.hidden_size, model.norm, model.layers[number]
    experts = layer.experts
    if norm.has_weight:
        for name in _NORMS[layer.norms]:
            yield name, (hidden,), norm.has_bias
    if layer.attention is not None:
        yield from _weights_of_attention(layer.attention, hidden)
    if layer.recurrent is not None:
        yield from _weights_of_recurrent(layer.recurrent, hidden)
    if experts is not None:
        yield "router", (experts.num_experts, hidden), experts.has_router_bias
        if experts.has_correction:
            yield "correction", (experts.num_experts,), False
        if experts.has_shared_gate:
            yield "shared_scale", (1, hidden), False


def _weights_of_attention(attention: AttentionSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    if attention.qk_norm != "none":
        is_whole = attention.qk_norm == "whole"
        yield "query_norm", (query if is_whole else attention.head_dim,), False
        yield "key_norm", (key if is_whole else attention.head_dim,), False
    if attention.has_sinks:
        yield "sinks", (attention.num_heads,), False
    yield "query", (query, hidden), attention.has_qkv_bias
    yield "key", (key, hidden), attention.has_qkv_bias
    yield "value", (key, hidden), attention.has_qkv_bias
    if attention.has_output_gate:
        yield "output_gate", (query, hidden), attention.has_qkv_bias
    yield "output", (hidden, query), attention.has_output_bias


def _weights_of_recurrent(spec: RecurrentSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    channels = spec.num_channels
    if isinstance(spec, ConvolutionSpec):
        yield "mixed", (3 * channels, hidden), spec.has_bias
        yield "taps", (channels, spec.num_taps), spec.has_bias
        yield "output", (hidden, channels), spec.has_bias
        return
    heads, values = spec.num_value_heads, spec.values_size
    yield "mixed", (channels, hidden), False
    yield "delta_gate", (values, hidden), False
    yield "delta_beta", (heads, hidden), False
    yield "delta_decay", (heads, hidden), False
    yield "taps", (channels, spec.num_taps), False
    yield "decay_rate", (heads,), False
    yield "decay_shift", (heads,), False
    yield "delta_scale", (spec.value_dim,), False
    yield "output", (hidden, values), False


def _weights_of_neurons(
    part: FeedForwardSpec, hidden: int, layer: int, expert: int = -1
) -> Iterator[tuple[WeightKey, tuple[int, ...], bool]]:
    for name in ("gate", "up", "down") if part.is_gated else ("up", "down"):
        shape = (hidden, part.size) if name == "down" else (part.size, hidden)
        yield WeightKey(name, layer, "weight", expert), shape, part.has_bias


def checkpoint_tensors(
    model: ModelSpec, names: TensorNames | None = None, keys: Iterable[WeightKey] | None = None
) -> dict[str, list[WeightKey]]:
    """The name of each tensor of the decoder in a checkpoint, and the weights that its rows are, in their order.

    names: the model's own by default. keys: of the weights, all by default.
    """
    tensors: dict[str, list[WeightKey]] = {}
    for key in model_weights(model) if keys is None else keys:
        tensors.setdefault(_tensor_name(key, model, names or model.names), []).append(key)
    return tensors


def _tensor_name(key: WeightKey, model: ModelSpec, names: TensorNames) -> str:
    owner, kind = "", f".{key.kind}"
    if key.expert >= 0:
        owner = "expert_"
        if names.stacking:
            kind = "_bias" if key.kind == "bias" else ""
    elif key.name in ("gate", "up", "down") and model.layers[key.layer].experts is not None:
        owner = "shared_"
    elif key.name in ("sinks", "correction", "decay_rate", "decay_shift"):
        # They are no module with a weight.
        kind = ""
    elif key.name == "output" and model.layers[key.layer].recurrent is not None:
        owner = "recurrent_"
    # Each head's query and gate are rows of one matrix.
    name: str = names.query if key.name == "output_gate" else getattr(names, owner + key.name)
    if key.name in ("query", "key", "value"):
        name = names.qkv or name
    elif key.name in ("gate", "up"):
        name = getattr(names, f"{owner}gate_up") or name
    elif key.name in ("mixed", "delta_gate"):
        name = names.mixed_and_gate or name
    elif key.name in ("delta_beta", "delta_decay"):
        name = names.beta_and_decay or name
    name = name.replace("{}", str(key.expert))
    if key.name == "lm_head":
        return name + kind
    return names.prefix + (name if key.name in ("embedding", "final_norm") else f"layers.{key.layer}.{name}") + kind


def packed_types(files: Iterable[WeightFile]) -> dict[WeightKey, str]:
    """The matrices that the compiled decoder multiplies by as codes, and their types, one of `PACKED_TYPES`."""
    types: dict[WeightKey, str] = {}
    for file in files:
        for weight in file.weights:
            is_codes = len(weight.shape) == 2 and weight.num_bytes and not weight.interleaved
            is_kept = is_codes and weight.dtype in PACKED_TYPES and weight.key.name not in FLOAT32_WEIGHTS
            types[weight.key] = weight.dtype if is_kept else ""
        for matrix in file.quantized:
            types |= dict.fromkeys(matrix.weights, matrix.scheme.packed_type(matrix.num_in))
    # Those of one product stay codes only together. A layer without gates has `up` alone.
    return {
        key: kind
        for key, kind in types.items()
        if kind
        and key.name not in FLOAT32_WEIGHTS
        and all(types.get(key._replace(name=name)) != "" for name in _multiplied_with(key.name))
    }


def _multiplied_with(name: str) -> tuple[str, ...]:
    return next((names for names in MULTIPLIED_TOGETHER if name in names), ())


def weight_bytes(
    model: ModelSpec, dtype_name: str, quantization: str = "none", types: Mapping[WeightKey, str] | None = None
) -> int:
    """Bytes of the decoder's weights in memory. `dtype_name` is the resolved dtype of what is not quantized.

    types: of matrices that are codes, see `matrix_types`.
    """
    num_bytes = 0
    for key, shape in model_weights(model).items():
        if types and key in types:
            num_out, num_in = shape
            attention = model.layers[key.layer].attention
            if attention is not None and key.name in ("query", "key", "value", "output_gate"):
                # Each head begins a panel.
                num_out = num_out // attention.head_dim * ceil_div(attention.head_dim, PANEL) * PANEL
            num_bytes += packed_bytes(types[key], num_out, num_in)
            continue
        is_multiplied = key.name not in FLOAT32_WEIGHTS and (model.tie_word_embeddings or key != _EMBEDDING)
        if quantization == "int8" and len(shape) == 2 and is_multiplied:
            # A matrix to multiply by, not an embedding that is only looked up.
            num_out, num_in = shape
            num_bytes += num_out * (ceil_div(num_in, INT8_BLOCK) * INT8_BLOCK + INT8_SCALE_BYTES)
        else:
            num_bytes += math.prod(shape) * DTYPE_BYTES["float32" if key.name in FLOAT32_WEIGHTS else dtype_name]
    return num_bytes


def find_weights(folder: Path, model: ModelSpec) -> list[WeightFile]:
    """The files of a checkpoint with the decoder's weights.

    Raises CheckpointError, naming the file and the tensor, unless each is there once with a dtype and shape that fit.
    """
    if (source := read_source(folder)) is not None:
        return _find_in_gguf(source, model)
    headers = {path: read_header(path) for path in find_shards(folder)}
    found = {path: _tensors_of(header, model) for path, header in headers.items()}
    names = _names_in(found.values(), model)
    shapes, known = model_weights(model), checkpoint_tensors(model, names)
    missing = dict(known)
    embedding, head = (_tensor_name(key, model, names) for key in (_EMBEDDING, _HEAD))
    has_embedding = any(tensor.role == embedding for tensors in found.values() for tensor in tensors)
    is_head_taken = not (model.tie_word_embeddings and has_embedding)
    parts = Parts(model.quantized) if model.quantized else None
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
        matrices = parts.matrices(missing, shapes, names.stacking)
        files = [file._replace(quantized=matrices.get(file.path, ())) for file in files]
    if missing:
        name = next(iter(missing))
        more = f" ({len(missing)} are)" if len(missing) > 1 else ""
        raise CheckpointError(f"{_where(folder, name)}: tensor {name} is missing{more}; download the model again")
    return files


def _names_in(found: Iterable[list[_Found]], model: ModelSpec) -> TensorNames:
    """The names by which the fewest tensors are missing."""
    roles = {tensor.role for tensors in found for tensor in tensors}
    if model.quantized:
        roles |= {whole for role in roles for whole in whole_names(role)}
    return min(
        (model.names, *model.other_names), key=lambda names: len(checkpoint_tensors(model, names).keys() - roles)
    )


def _find_in_gguf(source: GgufSource, model: ModelSpec) -> list[WeightFile]:
    shapes, missing = model_weights(model), _tensors_in_gguf(source, model)
    # Where those of transformers are left out that begin with the name of a layer, so are llama.cpp's.
    ignored = tuple(start.replace("model.layers.", "blk.") for start in model.names.ignored)
    files = []
    for part in source.parts:
        weights: list[StoredWeight] = []
        for tensor in part.tensors:
            if tensor.name.startswith(ignored):
                continue
            if tensor.name not in missing:
                raise CheckpointError(
                    f"{part.path}: tensor {tensor.name} is not one of {model.architecture} as the metadata describe "
                    "it; such models are not supported"
                )
            weights += _rows_in_gguf(
                part, tensor, {key: shapes[key] for key in missing.pop(tensor.name)}, source, model
            )
        files.append(WeightFile(Path(part.path), part.stamp(), weights))
    if missing:
        more = f" ({len(missing)} are)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{source.parts[0].path}: tensor {next(iter(missing))} is missing{more}; download the model again"
        )
    return files


def _tensors_in_gguf(source: GgufSource, model: ModelSpec) -> dict[str, list[WeightKey]]:
    """The name of each tensor in the files, and the weights that its rows are, in their order.

    The matrices of all experts of a layer are one tensor, those of gate and up two.
    """
    tensors: dict[str, list[WeightKey]] = {}
    others = []
    for key in model_weights(model):
        if (name := expert_tensor(key, has_experts=model.layers[key.layer].experts is not None)) is not None:
            tensors.setdefault(name, []).append(key)
        else:
            others.append(key)
    roles = checkpoint_tensors(model, keys=others)
    names = source.tensor_names(roles, model.num_layers)
    return tensors | {names[role]: keys for role, keys in roles.items()}


def _rows_in_gguf(
    part: GgufPart,
    tensor: GgufTensor,
    shapes: dict[WeightKey, tuple[int, ...]],
    source: GgufSource,
    model: ModelSpec,
) -> Iterator[StoredWeight]:
    """The weights that a tensor consists of, with what undoes what llama.cpp's converter did to them."""
    num_rows, first = sum(shape[0] for shape in shapes.values()), next(iter(shapes))
    expected = [num_rows, *shapes[first][1:]]
    if first.expert >= 0:
        expected = [len(shapes), *shapes[first]]
    # A matrix of one row is a vector.
    if list(tensor.shape) not in (expected, expected[1:] if expected[0] == 1 else expected):
        raise CheckpointError(
            f"{part.path}: tensor {tensor.name} has shape {list(tensor.shape)}, by the metadata it is {expected}; "
            "download the file again"
        )
    is_blocks = tensor.type not in STORED_DTYPES
    if is_blocks and len(shapes[first]) == 1:
        raise CheckpointError(
            f"{part.path}: tensor {tensor.name} is a vector of type {tensor.type}, and vectors must be F32, F16 or "
            "BF16; take another file of the model"
        )
    row_bytes, offset = tensor.num_bytes // num_rows, tensor.offset
    for key, shape in shapes.items():
        attention = model.layers[key.layer].attention if key.name in ("query", "key") else None
        is_norm = key.name.endswith("_norm") and key.kind == "weight"
        yield StoredWeight(
            key,
            tensor.name,
            tensor.type,
            shape,
            offset,
            num_bytes=row_bytes * shape[0] if is_blocks else 0,
            head_rows=attention.head_dim if source.is_interleaved and attention is not None else 0,
            added=-model.norm.offset if is_norm else 0.0,
        )
        offset += row_bytes * shape[0]


def _tensors_of(header: SafetensorsHeader, model: ModelSpec) -> list[_Found]:
    """The file's tensors that belong to the decoder, in the order of their data."""
    tensors = []
    for name, info in tensors_by_offset(header):
        if name.endswith(_OLD_BUFFER) or name.startswith(model.names.ignored):
            continue
        tensors.append(_Found(name, model.names.without_alias(name), info))
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
    for key, first_row, count in _pieces_of(shapes, model):
        shape = (count, *shapes[key][1:])
        yield StoredWeight(key, name, info.dtype, shape, offset, first_row=first_row)
        offset += (end - start) // num_rows * count


def _pieces_of(shapes: dict[WeightKey, tuple[int, ...]], model: ModelSpec) -> Iterator[tuple[WeightKey, int, int]]:
    """The rows of a tensor in their order: of which weight they are, from which of its rows on, and how many."""
    by_name = {key.name: key for key in shapes}
    layer = model.layers[next(iter(shapes)).layer]
    attention, delta = layer.attention, layer.recurrent
    num_heads, turns = 1, [(key, 0, shape[0]) for key, shape in shapes.items()]
    if attention is not None and "output_gate" in by_name:
        # Each head's query, then its gate.
        num_heads = attention.num_heads
        turns = [(key, 0, attention.head_dim) for key in shapes]
    elif isinstance(delta, DeltaSpec) and by_name.keys() & {"delta_gate", "delta_beta"} and len(shapes) > 1:
        # Each key head's rows of each weight. Of `mixed` they are its query, its key, and its values.
        num_heads, size, values = delta.num_key_heads, delta.key_dim, delta.values_size // delta.num_key_heads
        turns = [(key, 0, shape[0] // num_heads) for key, shape in shapes.items()]
        if "mixed" in by_name:
            mixed, keys = by_name["mixed"], delta.keys_size
            turns[:1] = [(mixed, 0, size), (mixed, keys, size), (mixed, 2 * keys, values)]
    for head in range(num_heads):
        for key, first, count in turns:
            yield key, first + head * count, count


def _why_unknown(name: str, known: Container[str], model: ModelSpec) -> str:
    if name in known:
        return "is in two files"
    if name.endswith(_QUANTIZED_PARTS):
        has_none = f"({model.quantized.name}) its module has none" if model.quantized else "no weights are quantized"
        return f"belongs to quantized weights, and by config.json {has_none}; {_UNQUANTIZED}"
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
