"""The config.json of a checkpoint folder, checked and turned into a `ModelSpec`. Loads no torch.

`families/` knows the fields of each architecture. The control plane reads this too, to size the KV cache and to name
the model in a trace.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eventlm.errors import CheckpointError, UsageError
from eventlm.kernels.cpu.native import PANEL
from eventlm.models.checkpoint.json_files import convert_object, read_json_object
from eventlm.models.checkpoint.safetensors_header import find_shards, read_header
from eventlm.models.families import DECODER_NAMES, FAMILIES, MULTIMODAL, TOWER_NAMES, Multimodal
from eventlm.models.families.fields import ConfigError
from eventlm.models.gguf.source import read_source
from eventlm.models.quantized.method import OLD_FILE, read_method, read_old_method
from eventlm.models.spec import DTYPE_BYTES, KVShape, ModelSpec, why_not_on_gpus
from eventlm.models.transformers_model import ServedModel, TransformersModel
from eventlm.models.weights.tied_head import has_own_head
from eventlm.types import ceil_div

#: Dtype of what a quantized model does not quantize.
QUANTIZED_DTYPE = "bfloat16"
#: Dtypes of keys and values with one byte an element, and a float32 scale for each token and head.
SCALED_KV_DTYPES = ("int8", "fp8")
KV_SCALE_BYTES = 4

_DTYPE_KEYS = ("dtype", "torch_dtype")
#: What a multimodal model's config.json says of the whole, and so of the decoder.
_OF_THE_WHOLE = (*_DTYPE_KEYS, "tie_word_embeddings")
#: How much of a name that is not known an error quotes, and how many names that are like it.
_QUOTED_CHARACTERS, _NUM_NEAREST = 80, 3
_HEADER_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
#: Tokens of its context that one pass of a decode attends to, attention_plan.h's kContextPerPass.
_CONTEXT_PER_PASS = 1024
_FINGERPRINT_SAMPLES = 16
_FINGERPRINT_SAMPLE_BYTES = 4096


class UnknownArchitectureError(CheckpointError):
    """The architecture, or a field of it, is one that eventlm does not know. Transformers may."""


class _RawFamily(Struct, frozen=True, kw_only=True):
    """The model's family, which defines the meaning of the other fields."""

    architectures: list[str] | None = None
    model_type: str | None = None


def read_model(folder: str | Path) -> ModelSpec:
    """The decoder that the checkpoint in `folder` describes.

    A head that differs from the embedding is used, whatever config.json says, as in transformers 5. Raises
    CheckpointError, naming the file, what it holds and what is supported, if it cannot be served.
    """
    folder = Path(folder)
    path = folder / "config.json"
    model = model_of(read_json_object(path), path)
    if model.quantized is None and (method := read_old_method(folder)) is not None:
        model = msgspec.structs.replace(model, quantized=method, dtype=QUANTIZED_DTYPE)
    if not model.dtype:
        model = msgspec.structs.replace(model, dtype=stored_dtype(folder))
    if model.tie_word_embeddings and has_own_head(folder, model.names):
        model = msgspec.structs.replace(model, tie_word_embeddings=False)
    return model


def model_of(values: dict[str, Any], path: Path) -> ModelSpec:
    """The decoder that these fields of config.json describe; errors name the file `path`.

    Its dtype is empty if they name none. Raises CheckpointError.
    """
    quantized = read_method(values, path)
    architecture = _architecture(path, values)
    outer = MULTIMODAL.get(architecture)
    if outer is not None:
        values = _decoder_of(path, values)
        quantized = quantized or read_method(values, path)
    family = FAMILIES[_decoder_architecture(path, values, outer) if outer is not None else architecture]
    fields = convert_object(values, family.fields, path, inside="text_config" if outer is not None else "")
    try:
        model = family.make(fields)
    except ConfigError as error:
        raise UnknownArchitectureError(f"{path}: {error}") from error
    names = model.names
    if outer is not None:
        names = msgspec.structs.replace(names, ignored=(*TOWER_NAMES, *names.ignored), aliases=DECODER_NAMES)
    dtype = QUANTIZED_DTYPE if quantized else model.dtype
    return msgspec.structs.replace(model, architecture=architecture, names=names, dtype=dtype, quantized=quantized)


def kv_bytes_per_token(config: ServedModel, kv_dtype: str) -> int:
    """Bytes that the keys and values of one token take in all layers. `kv_dtype`: see `resolve_kv_dtype`."""
    num_bytes = 0
    for shape in _kv_shapes(config):
        is_scaled = kv_dtype in SCALED_KV_DTYPES
        head_bytes = shape.head_dim + KV_SCALE_BYTES if is_scaled else shape.head_dim * DTYPE_BYTES[kv_dtype]
        num_bytes += 2 * shape.num_heads * head_bytes
    return num_bytes


def state_bytes(config: ServedModel) -> int:
    """Bytes that the states of one sequence take in all recurrent layers; 0: the model has none."""
    return config.state_size * DTYPE_BYTES["float32"] if isinstance(config, ModelSpec) else 0


def rope_bytes(config: ServedModel, dtype: str, *, is_on_gpu: bool = False) -> int:
    """Bytes that rotary tables take for each position of the context, at most; transformers keeps none.

    dtype: what GPUs compute in. The compiled forward pass has float32, and what neighbours turn by twice.
    """
    if isinstance(config, TransformersModel):
        return 0
    if is_on_gpu:
        return 2 * sum(rope.num_turned for rope in config.ropes) * DTYPE_BYTES[dtype]
    return sum((4 if rope.is_interleaved else 2) * rope.num_turned for rope in config.ropes) * DTYPE_BYTES["float32"]


def activation_bytes(config: ServedModel, *, num_tokens: int, num_rows: int, context: int) -> int:
    """Bytes that the compiled forward pass works on in a step, at most, with its logits; 0 if transformers computes.

    num_rows: that draw a token, or are a decode. context: tokens of the longest one's. As if all were float32 and a
    model had all that one can have between its products, see `kernels/cpu/decoder.h`.
    """
    if isinstance(config, TransformersModel):
        return 0
    hidden, layers = config.hidden_size, config.layers
    heads = [(3 * each.num_heads + each.num_kv_heads) * each.head_dim for each in config.attentions.values()]
    channels = [4 * layer.recurrent.num_channels for layer in layers if layer.recurrent is not None]
    neurons = [layer.dense.size for layer in layers if layer.dense is not None]
    inputs = [config.num_layers * config.layer_inputs.size] if config.layer_inputs is not None else []
    size = 6 * hidden + sum(max(each, default=0) for each in (heads, channels, neurons, inputs))
    # Rows of each expert are padded to a tile.
    of_experts = [
        3 * num_tokens * each.num_experts
        + (num_tokens * each.num_active + 15 * each.num_experts) * (hidden + each.expert.size)
        for each in (layer.experts for layer in layers)
        if each is not None
    ]
    # Of each head in each pass of a decode: what it gives, maximum and sum.
    partials = [
        ceil_div(min(context, each.window or context), _CONTEXT_PER_PASS) * each.num_heads * (each.head_dim + 2)
        for each in config.attentions.values()
    ]
    # Where logits are not wanted, the best token of each panel and its score.
    logits = config.vocab_size + 2 * ceil_div(config.vocab_size, PANEL)
    of_rows = num_rows * (logits + max(partials, default=0))
    return DTYPE_BYTES["float32"] * (num_tokens * size + max(of_experts, default=0) + of_rows)


def resolve_kv_dtype(config: ServedModel, dtype: str, requested: str) -> str:
    """The dtype to keep keys and values in: `requested`, or for `auto` `dtype`, what is computed in.

    Raises UsageError if the size of the model's heads does not allow it.
    """
    for shape in _kv_shapes(config):
        if requested in SCALED_KV_DTYPES and shape.head_dim % KV_SCALE_BYTES:
            raise UsageError(
                f"--kv-cache-dtype {requested} needs heads of a multiple of {KV_SCALE_BYTES}, this model's have "
                f"{shape.head_dim}; use auto or bfloat16"
            )
    return dtype if requested == "auto" else requested


def resolve_dtype(config: ServedModel, requested: str, quantization: str = "none") -> str:
    """The dtype to compute in: `requested`, or the checkpoint's own for `auto`.

    With a `quantization`: of what is not quantized. Raises UsageError if it cannot be combined with `requested`.
    """
    check_quantization(requested, quantization)
    if quantization != "none":
        return QUANTIZED_DTYPE
    name = config.dtype if requested == "auto" else requested
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"dtype {name} is not supported (supported: {', '.join(DTYPE_BYTES)}); pass --dtype")
    return name


def check_runs_on_gpu(config: ServedModel) -> ModelSpec:
    """The model, if GPUs can run it. Raises UsageError for one that only processors can."""
    if isinstance(config, TransformersModel):
        raise UsageError(f"transformers computes this {config.architecture}, and on processors only; take --device cpu")
    if reason := why_not_on_gpus(config):
        raise UsageError(f"GPUs cannot run this {config.architecture}: it has {reason}; take --device cpu")
    return config


def check_quantization(dtype: str, quantization: str) -> None:
    """Raise UsageError if no model can be run with both."""
    if quantization != "none" and dtype not in ("auto", QUANTIZED_DTYPE):
        raise UsageError(
            f"--quantization {quantization} computes in {QUANTIZED_DTYPE} what it does not quantize; --dtype {dtype} "
            "cannot be combined with it; leave one of them out"
        )


def model_fingerprint(folder: str | Path) -> str:
    """A hash that identifies the checkpoint in a trace, 32 hex digits.

    Over config.json, what old checkpoints have beside it and, for each weight file, its name, size, header (names,
    shapes, dtypes, offsets) and a few pages at even distances, so that a model and its fine-tune differ although no
    file is read entirely. Of a GGUF file it is over its header, which has all of that, and pages.
    """
    folder = Path(folder)
    if (source := read_source(folder)) is not None:
        return source.fingerprint
    digest = hashlib.blake2b(digest_size=16)
    for name in ("config.json", *([OLD_FILE] if (folder / OLD_FILE).is_file() else [])):
        try:
            digest.update((folder / name).read_bytes())
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror or error}") from error
    for path in find_shards(folder):
        header = read_header(path)
        digest.update(f"\0{path.name}\0{header.file_bytes}\0".encode())
        digest.update(header.raw)
        for page in weight_samples(path, header.data_start, header.file_bytes):
            digest.update(page)
    return digest.hexdigest()


def weight_samples(path: Path, start: int, end: int) -> Iterator[bytes]:
    """A few pages of a file at even distances between two offsets."""
    try:
        with path.open("rb") as file:
            for sample in range(_FINGERPRINT_SAMPLES):
                file.seek(start + (end - start) * sample // _FINGERPRINT_SAMPLES)
                yield file.read(_FINGERPRINT_SAMPLE_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _kv_shapes(config: ServedModel) -> list[KVShape]:
    """Of the layers that store keys and values."""
    return [shape for shape in config.kv_shapes if shape is not None]


def _architecture(path: Path, values: dict[str, Any]) -> str:
    family = convert_object(values, _RawFamily, path)
    found = family.architectures[0] if family.architectures else ""
    known = (*FAMILIES, *MULTIMODAL)
    if found in known:
        return found
    model_type = family.model_type or ""
    near = _nearest(found or f"{model_type.replace('_', '')}ForCausalLM", known)
    if found:
        those = f"near it are {', '.join(near)}; docs/models.md" if near else "docs/models.md"
        raise UnknownArchitectureError(
            f"{path}: architecture {found[:_QUOTED_CHARACTERS]!r} is not supported ({those} has all that are)"
        )
    example = near[0] if model_type and near else "LlamaForCausalLM"
    kind = f" of this {model_type[:_QUOTED_CHARACTERS]!r}" if model_type else ""
    raise CheckpointError(
        f"{path}: architectures is missing; add it, with the architecture{kind} as docs/models.md names it, such as "
        f'["{example}"]'
    )


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """The known names that are most like one, whatever its case."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name[:_QUOTED_CHARACTERS].lower(), by_lower, n=_NUM_NEAREST)
    return [by_lower[each] for each in near]


def _decoder_architecture(path: Path, values: dict[str, Any], outer: Multimodal) -> str:
    found = convert_object(values, _RawFamily, path, inside="text_config")
    kind = found.model_type or next(iter(outer.decoders))
    if kind not in outer.decoders:
        raise CheckpointError(
            f"{path}: text_config: model_type {kind} is not supported (supported: {', '.join(outer.decoders)})"
        )
    return outer.decoders[kind]


def _decoder_of(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What the config of a multimodal model says of its decoder. Some of it stands with what is said of the whole."""
    inner = values.get("text_config")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{path}: text_config is missing; it describes the decoder of a multimodal model")
    outer = {key: value for key in _OF_THE_WHOLE if (value := values.get(key)) is not None}
    if outer.keys() & {*_DTYPE_KEYS}:
        inner = {key: value for key, value in inner.items() if key not in _DTYPE_KEYS}
    return inner | outer


def stored_dtype(folder: Path) -> str:
    """The dtype of the first floating tensor, for a config.json that names none."""
    for path in find_shards(folder):
        for tensor in read_header(path).tensors.values():
            if tensor.dtype in _HEADER_DTYPES:
                return _HEADER_DTYPES[tensor.dtype]
    return "float32"
