"""The weights of a decoder in a checkpoint's files, found and checked by the headers before any is read.

Loads no torch, so that a folder is checked before a worker starts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from eventlm.errors import CheckpointError
from eventlm.models.config import DTYPE_BYTES, DecoderConfig
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
from eventlm.types import ceil_div

STORED_DTYPES = ("BF16", "F16", "F32", "F64")
#: Inputs of an int8 matrix are padded to a multiple of this; each of its outputs has a scale, a float32.
INT8_BLOCK = 64
INT8_SCALE_BYTES = 4
#: With `tie_word_embeddings` they are one matrix, which a checkpoint has under either name or under both.
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: End of the names of buffers in old checkpoints. They are not weights.
_OLD_BUFFER = "rotary_emb.inv_freq"
#: Samples of two matrices that are compared, and bytes of each.
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096
_UNQUANTIZED = "take the model in bfloat16 or float16 (--quantization int8 quantizes it while it loads)"
#: Ends of the names of tensors that only quantized checkpoints have.
_QUANTIZED_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "input_scale", "weight_packed"),
    *("absmax", "quant_map", "SCB", "quant_state.bitsandbytes__nf4", "biases"),
)


class StoredTensor(NamedTuple):
    """A tensor of a file. `offset` is that of its data from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class WeightFile(NamedTuple):
    """A file of a checkpoint with those of its tensors that the decoder takes, in the order of their data."""

    path: Path
    stamp: FileStamp
    tensors: list[StoredTensor]


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The name of each tensor of the decoder in a checkpoint, and its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (key, hidden, config.attention_bias),
        "self_attn.v_proj": (key, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.attention_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}
        for name, (num_out, num_in, has_bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (num_out,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    return shapes


def weight_bytes(config: DecoderConfig, dtype_name: str, quantization: str = "none") -> int:
    """Bytes of the decoder's weights in memory. `dtype_name` is the resolved dtype of what is not quantized."""
    num_bytes = 0
    for name, shape in weight_shapes(config).items():
        if quantization == "int8" and _is_multiplied(name, shape, config):
            num_out, num_in = shape
            num_bytes += num_out * (ceil_div(num_in, INT8_BLOCK) * INT8_BLOCK + INT8_SCALE_BYTES)
        else:
            num_bytes += math.prod(shape) * DTYPE_BYTES[dtype_name]
    return num_bytes


def _is_multiplied(name: str, shape: tuple[int, ...], config: DecoderConfig) -> bool:
    """Whether it is a matrix to multiply by, not an embedding that is only looked up."""
    return len(shape) == 2 and (config.tie_word_embeddings or name != _EMBEDDING)


def find_weights(folder: Path, config: DecoderConfig) -> list[WeightFile]:
    """The files of a checkpoint with the decoder's tensors.

    Raises CheckpointError, naming the file and the tensor, unless each is there once with a dtype and shape that fit.
    """
    missing = weight_shapes(config)
    files = []
    headers = {path: read_header(path) for path in find_shards(folder)}
    ends = {
        name: (path, header)
        for path, header in headers.items()
        for name in (_EMBEDDING, _HEAD)
        if name in header.tensors
    }
    is_head_taken = not config.tie_word_embeddings or _EMBEDDING not in ends
    for path, header in headers.items():
        taken = {
            name: info
            for name, info in tensors_by_offset(header)
            if not name.endswith(_OLD_BUFFER) and (is_head_taken or name != _HEAD)
        }
        _check(path, taken, missing, config)
        tensors = [
            StoredTensor(_role(name, config), info.dtype, info.shape, header.data_start + info.data_offsets[0])
            for name, info in taken.items()
        ]
        files.append(WeightFile(path, header.stamp, tensors))
    if missing:
        name = next(iter(missing))
        more = f" ({len(missing)} are)" if len(missing) > 1 else ""
        raise CheckpointError(f"{_where(folder, name)}: tensor {name} is missing{more}; download the model again")
    if not is_head_taken and _HEAD in ends:
        _check_tied(ends)
    return files


def _role(name: str, config: DecoderConfig) -> str:
    """The name of a stored tensor by `weight_shapes`."""
    return _EMBEDDING if config.tie_word_embeddings and name == _HEAD else name


def _check_tied(headers: dict[str, tuple[Path, SafetensorsHeader]]) -> None:
    """Raise CheckpointError if a head that is not loaded differs from the embedding, unless their dtypes do."""
    embedding, head = (headers[name][1].tensors[name] for name in (_EMBEDDING, _HEAD))
    is_alike = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
    if is_alike and _samples(*headers[_EMBEDDING], embedding) != _samples(*headers[_HEAD], head):
        raise CheckpointError(
            f"{headers[_HEAD][0]}: tensor {_HEAD} differs from {_EMBEDDING}, but config.json ties them; set "
            "tie_word_embeddings to false there to use both, or remove the tensor from the file"
        )


def _samples(path: Path, header: SafetensorsHeader, tensor: TensorInfo) -> list[bytes]:
    """Pieces of a tensor's data at even distances."""
    start, end = tensor.data_offsets
    samples = []
    try:
        with path.open("rb") as file:
            for index in range(_NUM_SAMPLES):
                position = start + (end - start) * index // _NUM_SAMPLES
                file.seek(header.data_start + position)
                samples.append(file.read(min(_SAMPLE_BYTES, end - position)))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return samples


def _check(
    path: Path, tensors: dict[str, TensorInfo], missing: dict[str, tuple[int, ...]], config: DecoderConfig
) -> None:
    """Check the file's tensors, and take them out of `missing`."""
    for name, info in tensors.items():
        role = _role(name, config)
        if role not in missing:
            raise CheckpointError(f"{path}: tensor {name} {_why_unknown(role, config)}")
        shape = missing.pop(role)
        if info.dtype not in STORED_DTYPES:
            raise CheckpointError(f"{path}: tensor {name} has dtype {info.dtype}{_why_not(info)}")
        if info.shape != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(info.shape)}, by config.json it is {list(shape)}; "
                "the two files are not of one model"
            )


def _why_unknown(name: str, config: DecoderConfig) -> str:
    if name in weight_shapes(config):
        return "is in two files"
    if name.endswith(_QUANTIZED_PARTS):
        return f"belongs to quantized weights, which are not supported; {_UNQUANTIZED}"
    return f"is not one of {config.architecture} as config.json describes it; the two files are not of one model"


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
