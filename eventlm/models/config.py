"""The config.json of a checkpoint folder, checked and reduced to what a decoder needs. Loads no torch.

Two families share one decoder: Llama and Qwen3 (which adds a norm on each head's query and key). The control
plane reads this too, to size the KV cache and to name the model in a trace.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from eventlm.errors import CheckpointError, UsageError
from eventlm.models.json_files import convert_object, read_json_object
from eventlm.models.safetensors_header import find_shards, read_header

Positive = Annotated[int, Meta(ge=1)]
RopeType = Literal["default", "linear", "llama3"]

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Dtype of what a quantized model does not quantize.
QUANTIZED_DTYPE = "bfloat16"
#: Dtypes of keys and values with one byte an element, and a float32 scale for each token and head.
SCALED_KV_DTYPES = ("int8", "fp8")
KV_SCALE_BYTES = 4

_HEADER_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
#: What each family's own config class assumes for a head_dim that its config.json leaves out; 0: from the
#: hidden size.
_DEFAULT_HEAD_DIM = {"LlamaForCausalLM": 0, "Qwen3ForCausalLM": 128}
_FINGERPRINT_SAMPLES = 16
_FINGERPRINT_SAMPLE_BYTES = 4096


class RopeConfig(Struct, frozen=True, kw_only=True):
    """Rotary position embedding. `factor` and what follows it belong to the scaled types."""

    type: RopeType = "default"
    theta: float = field(name="rope_theta", default=10000.0)
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


class DecoderConfig(Struct, frozen=True, kw_only=True):
    """A decoder's shape.

    `dtype` is the one its weights are stored in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: str


class _RawConfig(Struct, frozen=True, kw_only=True):
    """The fields of config.json that matter, with the families' own defaults."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Positive
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: list[str] | None = None


class _RawFamily(Struct, frozen=True, kw_only=True):
    """The model's family, which defines the meaning of the other fields."""

    architectures: list[str] | None = None
    model_type: str | None = None


def read_config(folder: str | Path) -> DecoderConfig:
    """The config of the checkpoint in `folder`.

    Raises CheckpointError, naming the file, what it holds and what is supported, if it cannot be served.
    """
    path = Path(folder) / "config.json"
    values = read_json_object(path)
    architecture = _architecture(path, values)
    _check_not_quantized(path, values)
    raw = convert_object(values, _RawConfig, path)
    _check_shape(path, raw)
    head_dim = raw.head_dim or _DEFAULT_HEAD_DIM[architecture] or raw.hidden_size // raw.num_attention_heads
    if head_dim % 2:
        raise CheckpointError(f"{path}: head_dim is {head_dim}; rotary embeddings need an even one")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=head_dim,
        max_position_embeddings=raw.max_position_embeddings,
        rms_norm_eps=raw.rms_norm_eps,
        tie_word_embeddings=raw.tie_word_embeddings,
        attention_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope=_rope(path, raw),
        dtype=raw.dtype or raw.torch_dtype or _stored_dtype(folder),
    )


def longest_context(config: DecoderConfig) -> int:
    """Tokens of the longest context that the model was made for.

    By the convention of transformers, linear scaling stretches the positions that config.json names, while those of
    Llama 3's scaling are stretched already.
    """
    stretch = max(config.rope.factor, 1.0) if config.rope.type == "linear" else 1.0
    return int(config.max_position_embeddings * stretch)


def kv_bytes_per_token(config: DecoderConfig, kv_dtype: str) -> int:
    """Bytes that the keys and values of one token take in all layers. `kv_dtype`: see `resolve_kv_dtype`."""
    if kv_dtype in SCALED_KV_DTYPES:
        head_bytes = config.head_dim + KV_SCALE_BYTES
    else:
        head_bytes = config.head_dim * DTYPE_BYTES[kv_dtype]
    return 2 * config.num_layers * config.num_kv_heads * head_bytes


def resolve_kv_dtype(config: DecoderConfig, dtype: str, requested: str) -> str:
    """The dtype to keep keys and values in: `requested`, or for `auto` `dtype`, what is computed in.

    Raises UsageError if the size of the model's heads does not allow it.
    """
    if requested in SCALED_KV_DTYPES and config.head_dim % KV_SCALE_BYTES:
        raise UsageError(
            f"--kv-cache-dtype {requested} needs heads of a multiple of {KV_SCALE_BYTES}, this model's have "
            f"{config.head_dim}; use auto or bfloat16"
        )
    return dtype if requested == "auto" else requested


def resolve_dtype(config: DecoderConfig, requested: str, quantization: str = "none") -> str:
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


def check_quantization(dtype: str, quantization: str) -> None:
    """Raise UsageError if no model can be run with both."""
    if quantization != "none" and dtype not in ("auto", QUANTIZED_DTYPE):
        raise UsageError(
            f"--quantization {quantization} computes in {QUANTIZED_DTYPE} what it does not quantize; --dtype {dtype} "
            "cannot be combined with it; leave one of them out"
        )


def model_fingerprint(folder: str | Path) -> str:
    """A hash that identifies the checkpoint in a trace, 32 hex digits.

    Over config.json and, for each weight file, its name, size, header (names, shapes, dtypes, offsets) and a
    few pages at even distances, so that a model and its fine-tune differ although no file is read entirely.
    """
    folder = Path(folder)
    digest = hashlib.blake2b(digest_size=16)
    try:
        digest.update((folder / "config.json").read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error.strerror or error}") from error
    for path in find_shards(folder):
        header = read_header(path)
        digest.update(f"\0{path.name}\0{header.file_bytes}\0".encode())
        digest.update(header.raw)
        data_bytes = header.file_bytes - header.data_start
        with path.open("rb") as file:
            for sample in range(_FINGERPRINT_SAMPLES):
                file.seek(header.data_start + data_bytes * sample // _FINGERPRINT_SAMPLES)
                digest.update(file.read(_FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()


def _architecture(path: Path, values: dict[str, Any]) -> str:
    family = convert_object(values, _RawFamily, path)
    found = family.architectures[0] if family.architectures else f"model_type {family.model_type}"
    if found not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise CheckpointError(f"{path}: architecture {found} is not supported (supported: {supported})")
    return found


def _check_not_quantized(path: Path, values: dict[str, Any]) -> None:
    """Transformers' key, its older one, and that of MLX."""
    for key in ("quantization_config", "compression_config", "quantization"):
        found = values.get(key)
        if found is None:
            continue
        of_how = found if isinstance(found, dict) else {}
        method = of_how.get("quant_method", "an unknown method" if key != "quantization" else "MLX")
        bits = of_how.get("bits", 4 if of_how.get("load_in_4bit") else 8 if of_how.get("load_in_8bit") else None)
        in_bits = f" in {bits} bits" if isinstance(bits, int) else ""
        raise CheckpointError(
            f"{path}: its weights are quantized ({key}: {method}{in_bits}), and such checkpoints cannot be run; take "
            "the one in bfloat16 or float16 that it was made from (--quantization int8 quantizes it while it loads)"
        )


def _check_shape(path: Path, raw: _RawConfig) -> None:
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {raw.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if raw.hidden_act != "silu":
        raise CheckpointError(f"{path}: hidden_act {raw.hidden_act} is not supported (supported: silu)")
    sliding = (
        raw.use_sliding_window and raw.sliding_window is not None and raw.max_window_layers < raw.num_hidden_layers
    )
    if raw.layer_types is not None:
        sliding = any(kind != "full_attention" for kind in raw.layer_types)
    if sliding:
        raise CheckpointError(f"{path}: sliding window attention is not supported (supported: full attention)")


def _rope(path: Path, raw: _RawConfig) -> RopeConfig:
    """Rope from `rope_scaling`, else from `rope_parameters` (transformers 5), and from the top level of config.json.

    The precedence is that of transformers, where the one that is used hides all of the other.
    """
    scaling = raw.rope_scaling or raw.rope_parameters or {}
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    if kind not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise CheckpointError(f"{path}: rope type {kind} is not supported (supported: {supported})")
    partial = scaling.get("partial_rotary_factor", raw.partial_rotary_factor)
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"{path}: partial_rotary_factor {partial} is not supported (supported: 1.0)")
    required = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }
    for name in required[kind]:
        if name not in scaling:
            raise CheckpointError(f"{path}: rope type {kind} needs {name}")
    values = {"type": kind} | {name: scaling[name] for name in required[kind]}
    if theta := scaling.get("rope_theta") or raw.rope_theta:
        values["rope_theta"] = theta
    values["original_max_position_embeddings"] = (
        raw.original_max_position_embeddings
        or scaling.get("original_max_position_embeddings")
        or raw.max_position_embeddings
    )
    return convert_object(values, RopeConfig, path, inside="rope_scaling" if raw.rope_scaling else "rope_parameters")


def _stored_dtype(folder: str | Path) -> str:
    """The dtype of the first floating tensor, for a config.json that names none."""
    for path in find_shards(Path(folder)):
        for tensor in read_header(path).tensors.values():
            if tensor.dtype in _HEADER_DTYPES:
                return _HEADER_DTYPES[tensor.dtype]
    return "float32"
