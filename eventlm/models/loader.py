"""Fills a decoder from safetensors files.

Every tensor of the checkpoint is checked by its header before anything is read, then copied once, from the
mapped file into its place in a fused or packed weight, converted to the decoder's dtype on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.decoder import CpuDecoder
from eventlm.kernels.cpu.native import NativeShape
from eventlm.models.config import DecoderConfig, read_config, resolve_dtype
from eventlm.models.decoder import Decoder, DecoderLayer, Linear
from eventlm.models.rope import angles
from eventlm.models.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    Header,
    find_shards,
    read_header,
    read_index,
    tensors_by_offset,
)

#: What a CpuDecoder calls the last but one word of a tensor's name.
_NATIVE_PARTS = {
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
    "norm": "final_norm",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
_STORED_DTYPES = ("BF16", "F16", "F32", "F64")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a resolved dtype name."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def load_decoder(folder: str | Path, *, dtype: str = "auto", device: str = "cpu") -> Decoder:
    """The decoder of the checkpoint in `folder`, ready to run.

    Raises CheckpointError naming the file and the tensor where one is missing, unexpected, cut short, or of
    another shape than config.json says.
    """
    folder = Path(folder)
    config = read_config(folder)
    decoder = _empty_decoder(config, torch_dtype(resolve_dtype(config, dtype)), device)
    targets = dict(_targets(decoder))
    for name, tensor in checked_tensors(folder, config, targets):
        targets[name].copy_(tensor)
    return decoder


def load_cpu_decoder(folder: str | Path, build: str, *, max_positions: int, num_threads: int) -> CpuDecoder:
    """The decoder of the checkpoint in `folder`, its weights packed for a build of `eventlm.kernels.cpu`.

    Raises CheckpointError like `load_decoder`.
    """
    folder = Path(folder)
    config = read_config(folder)
    expected = dict(_targets(_empty_decoder(config, torch.bfloat16, "meta")))
    cosines, sines = angles(config, max_positions)
    try:
        decoder = CpuDecoder(build, native_shape(config, max_positions), cosines, sines, num_threads=num_threads)
    except MemoryError as error:
        raise CheckpointError(
            f"{folder}: this machine gives neither its weights nor {num_threads} threads their memory; lower --threads "
            "or take a smaller model"
        ) from error
    for name, tensor in checked_tensors(folder, config, expected):
        part, layer = _native_name(name)
        decoder.load(part, layer, tensor)
    return decoder


def native_shape(config: DecoderConfig, max_positions: int) -> NativeShape:
    """What the compiled decoder must know of a model."""
    return NativeShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_positions=max_positions,
        is_tied=config.tie_word_embeddings,
        eps=config.rms_norm_eps,
    )


def _native_name(name: str) -> tuple[str, int]:
    """The part and the layer of a tensor of a checkpoint, as CpuDecoder calls them."""
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
    stem, kind = name.split(".")[-2:]
    part = _NATIVE_PARTS[stem]
    return (f"{part}_bias" if kind == "bias" else part), layer


def checked_tensors(folder: Path, config: DecoderConfig, expected: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by name, mapped from its files, once all are known to be there and as `expected`.

    Raises CheckpointError naming the file and the tensor.
    """
    shards = find_shards(folder)
    headers = [read_header(path) for path in shards]
    missing = dict(expected)
    for path, header in zip(shards, headers, strict=True):
        _check(path, header, missing, config)
    if missing:
        raise CheckpointError(f"{_where(folder, missing)}: tensor {min(missing)} is missing")
    for path, header in zip(shards, headers, strict=True):
        yield from _tensors(path, [name for name, _ in tensors_by_offset(header) if name in expected])


def _empty_decoder(config: DecoderConfig, dtype: torch.dtype, device: str) -> Decoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Decoder(config).eval()
    finally:
        torch.set_default_dtype(before)


def _targets(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Each tensor name of a checkpoint with the view of the decoder's weights that it fills."""
    config = decoder.config
    yield "model.embed_tokens.weight", decoder.embed_tokens
    yield "model.norm.weight", decoder.norm.weight
    if not config.tie_word_embeddings:
        yield "lm_head.weight", decoder.lm_head
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    for number, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{number}"
        yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight
        yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight
        attention = layer.self_attn
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        yield from _split(f"{prefix}.self_attn", parts, attention.qkv_proj)
        yield from _split(f"{prefix}.self_attn", {"o_proj": config.hidden_size}, attention.o_proj)
        if attention.q_norm is not None and attention.k_norm is not None:
            yield f"{prefix}.self_attn.q_norm.weight", attention.q_norm.weight
            yield f"{prefix}.self_attn.k_norm.weight", attention.k_norm.weight
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        yield from _split(f"{prefix}.mlp", parts, layer.mlp.gate_up_proj)
        yield from _split(f"{prefix}.mlp", {"down_proj": config.hidden_size}, layer.mlp.down_proj)


def _split(prefix: str, parts: dict[str, int], fused: Linear) -> Iterator[tuple[str, Tensor]]:
    """The rows of a fused matrix and of its bias under the names of the matrices that it was fused from."""
    for tensor, kind in ((fused.weight, "weight"), (fused.bias, "bias")):
        if tensor is not None:
            for name, part in zip(parts, tensor.split(list(parts.values())), strict=True):
                yield f"{prefix}.{name}.{kind}", part


def _check(path: Path, header: Header, expected: dict[str, Tensor], config: DecoderConfig) -> None:
    """Strike the file's tensors off `expected`."""
    for name, info in header.tensors.items():
        if _is_ignored(name, config):
            continue
        target = expected.pop(name, None)
        if target is None:
            raise CheckpointError(f"{path}: tensor {name} is not one of {config.architecture}, or comes twice")
        if info.shape != tuple(target.shape):
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(info.shape)}, config.json says {list(target.shape)}"
            )
        if info.dtype not in _STORED_DTYPES:
            supported = ", ".join(_STORED_DTYPES)
            raise CheckpointError(f"{path}: tensor {name} has dtype {info.dtype} (supported: {supported})")


def _is_ignored(name: str, config: DecoderConfig) -> bool:
    """Buffers that old checkpoints carry, and a head that is the embedding once more."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _where(folder: Path, missing: dict[str, Tensor]) -> Path:
    """The file that should hold the first of the missing tensors."""
    if (folder / SINGLE_FILE).exists():
        return folder / SINGLE_FILE
    file_name = read_index(folder / INDEX_FILE).get(min(missing))
    return folder / (file_name or INDEX_FILE)


def _tensors(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        for name in names:
            # A mapping of its own, so that the pages of one that has been copied do not count to this process any more.
            with safe_open(path, framework="pt") as file:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
