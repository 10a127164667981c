"""Fills a decoder from safetensors files.

Every tensor of the checkpoint is checked by its header before anything is read, then copied piece by piece into its
place in a fused or packed weight, converted to the decoder's dtype on the way. So the weights are in memory once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.decoder import CpuDecoder
from eventlm.kernels.int8_linear import quantize_rows
from eventlm.models.checkpoint_weights import find_weights
from eventlm.models.config import DecoderConfig, read_config, resolve_dtype
from eventlm.models.cpu_kernels import native_shape
from eventlm.models.decoder import Decoder, DecoderLayer, Linear
from eventlm.models.rope import angles
from eventlm.models.weight_reader import read_pieces
from eventlm.types import OnProgress

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


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a resolved dtype name."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def load_decoder(
    folder: str | Path,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    device: str = "cpu",
    on_progress: OnProgress | None = None,
) -> Decoder:
    """The decoder of the checkpoint in `folder`, ready to run. `on_progress` is told the bytes that were read.

    Raises CheckpointError naming the file and the tensor where one is missing, unexpected, cut short, or of
    another shape than config.json says.
    """
    folder = Path(folder)
    config = read_config(folder)
    files = find_weights(folder, config)
    decoder = _empty_decoder(config, torch_dtype(resolve_dtype(config, dtype, quantization)), device)
    if quantization == "int8":
        decoder.to_int8()
    targets, scales = dict(_targets(decoder)), dict(_scales(decoder))
    for name, first_row, values in read_pieces(files, on_progress):
        rows = slice(first_row, first_row + len(values))
        if name in scales:
            targets[name][rows], scales[name][rows] = quantize_rows(values)
        else:
            targets[name][rows].copy_(values)
    return decoder


def load_cpu_decoder(
    folder: str | Path,
    build: str,
    *,
    quantization: str = "none",
    max_positions: int,
    num_threads: int,
    on_progress: OnProgress | None = None,
) -> CpuDecoder:
    """The decoder of the checkpoint in `folder`, its weights packed for a build of `eventlm.kernels.cpu`.

    Raises CheckpointError, and tells `on_progress`, like `load_decoder`.
    """
    folder = Path(folder)
    config = read_config(folder)
    files = find_weights(folder, config)
    cosines, sines = angles(config, max_positions)
    try:
        decoder = CpuDecoder(
            build,
            native_shape(config, max_positions),
            cosines,
            sines,
            is_int8=quantization == "int8",
            num_threads=num_threads,
        )
        for name, first_row, values in read_pieces(files, on_progress):
            part, layer = _native_name(name)
            decoder.load(part, layer, values, first_row)
    except MemoryError as error:
        raise CheckpointError(
            f"{folder}: this machine gives neither its weights nor {num_threads} threads their memory; lower --threads "
            "or take a smaller model"
        ) from error
    return decoder


def _native_name(name: str) -> tuple[str, int]:
    """The part and the layer of a tensor of a checkpoint, as CpuDecoder calls them."""
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
    stem, kind = name.split(".")[-2:]
    part = _NATIVE_PARTS[stem]
    return (f"{part}_bias" if kind == "bias" else part), layer


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
    for number, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{number}"
        yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight
        yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight
        attention = layer.self_attn
        if attention.q_norm is not None and attention.k_norm is not None:
            yield f"{prefix}.self_attn.q_norm.weight", attention.q_norm.weight
            yield f"{prefix}.self_attn.k_norm.weight", attention.k_norm.weight
        for parts, fused in _fused(config, prefix, layer):
            yield from _split(parts, fused.weight, "weight")
            yield from _split(parts, fused.bias, "bias")


def _scales(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Each matrix that is quantized, as a checkpoint calls it, with the scales of its rows."""
    if decoder.lm_head_scales is not None:
        tied = decoder.config.tie_word_embeddings
        yield "model.embed_tokens.weight" if tied else "lm_head.weight", decoder.lm_head_scales
    for number, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        for parts, fused in _fused(decoder.config, f"model.layers.{number}", layer):
            yield from _split(parts, fused.scales, "weight")


def _fused(config: DecoderConfig, prefix: str, layer: DecoderLayer) -> Iterator[tuple[dict[str, int], Linear]]:
    """The matrices of a layer, each with the names and the rows of those that it was fused from."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {f"{attention}.q_proj": query, f"{attention}.k_proj": key, f"{attention}.v_proj": key}
    yield qkv, layer.self_attn.qkv_proj
    yield {f"{attention}.o_proj": config.hidden_size}, layer.self_attn.o_proj
    yield dict.fromkeys((f"{mlp}.gate_proj", f"{mlp}.up_proj"), config.intermediate_size), layer.mlp.gate_up_proj
    yield {f"{mlp}.down_proj": config.hidden_size}, layer.mlp.down_proj


def _split(parts: dict[str, int], fused: Tensor | None, kind: str) -> Iterator[tuple[str, Tensor]]:
    """The rows of a fused tensor under the names of those that it was fused from."""
    if fused is not None:
        for name, part in zip(parts, fused.split(list(parts.values())), strict=True):
            yield f"{name}.{kind}", part
