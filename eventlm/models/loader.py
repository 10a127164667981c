"""Fills a decoder from safetensors files.

Every tensor of the checkpoint is checked by its header before anything is read. Then it is copied piece by piece into
its place in a fused or packed weight and converted to the decoder's dtype. So the weights are in memory once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.decoder import CpuDecoder
from eventlm.kernels.int8_linear import quantize_rows
from eventlm.models.checkpoint_weights import find_weights, weight_shapes
from eventlm.models.config import DecoderConfig, read_config, resolve_dtype
from eventlm.models.cpu_kernels import native_shape
from eventlm.models.decoder import Decoder, Linear
from eventlm.models.rope import angles
from eventlm.models.weight_reader import read_pieces
from eventlm.types import OnProgress

#: The CpuDecoder's name for the second last part of a tensor's name.
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


#: Matrices that the decoder has fused, in the order of `weight_shapes`.
_FUSED_IN = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


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
    """The decoder of the checkpoint in `folder`, ready to run. `on_progress` gets the bytes that were read.

    Raises CheckpointError naming the file and the tensor if one is missing, unexpected, cut short, or of another
    shape than config.json gives.
    """
    folder = Path(folder)
    config = read_config(folder)
    files = find_weights(folder, config)
    decoder = _empty_decoder(config, torch_dtype(resolve_dtype(config, dtype, quantization)), device)
    if quantization == "int8":
        decoder.to_int8()
    targets = {name: (target, scales) for name, target, scales in _targets(decoder)}
    for name, first_row, values in read_pieces(files, on_progress):
        rows = slice(first_row, first_row + len(values))
        target, scales = targets[name]
        if scales is None:
            target[rows].copy_(values)
        else:
            target[rows], scales[rows] = quantize_rows(values)
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

    Raises CheckpointError, and calls `on_progress`, like `load_decoder`.
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
    """The part and the layer of a checkpoint's tensor, by CpuDecoder's names."""
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


def _targets(decoder: Decoder) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Each tensor of a checkpoint: its name, the weights that it fills, and the scales of its rows if quantized."""
    tied = decoder.config.tie_word_embeddings
    #: Rows of each fused tensor that are taken.
    num_rows: Counter[tuple[nn.Module, str]] = Counter()
    for name, shape in weight_shapes(decoder.config).items():
        *path, part, kind = name.removeprefix("model.").split(".")
        if part == "embed_tokens":
            yield name, decoder.embed_tokens, decoder.lm_head_scales if tied else None
        elif part == "lm_head":
            yield name, decoder.lm_head, decoder.lm_head_scales
        else:
            module = decoder.get_submodule(".".join([*path, _FUSED_IN.get(part, part)]))
            rows = slice(num_rows[module, kind], num_rows[module, kind] + shape[0])
            num_rows[module, kind] = rows.stop
            scales = module.scales if isinstance(module, Linear) and kind == "weight" else None
            yield name, getattr(module, kind)[rows], None if scales is None else scales[rows]
