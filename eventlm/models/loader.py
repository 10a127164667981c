"""Fills a decoder from safetensors files.

Every tensor of the checkpoint is checked by its header before anything is read, then copied once, from the
mapped file into its place in a fused weight, converted to the decoder's dtype on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eventlm.errors import CheckpointError
from eventlm.models.config import DecoderConfig, read_config, resolve_dtype
from eventlm.models.decoder import Decoder, DecoderLayer, Linear
from eventlm.models.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    Header,
    find_shards,
    read_header,
    read_index,
    tensors_by_offset,
)

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
    shards = find_shards(folder)
    headers = [read_header(path) for path in shards]
    decoder = _empty_decoder(config, torch_dtype(resolve_dtype(config, dtype)), device)
    targets = dict(_targets(decoder))
    expected = dict(targets)
    for path, header in zip(shards, headers, strict=True):
        _check(path, header, expected, config)
    if expected:
        raise CheckpointError(f"{_where(folder, expected)}: tensor {min(expected)} is missing")
    for path, header in zip(shards, headers, strict=True):
        _copy(path, header, targets)
    return decoder


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


def _copy(path: Path, header: Header, targets: dict[str, Tensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for name, _ in tensors_by_offset(header):
                if name in targets:
                    targets[name].copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
