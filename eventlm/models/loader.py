"""Fills a decoder from safetensors files.

Every tensor of the checkpoint is checked by its header before anything is read. Then it is copied piece by piece into
its place in a fused or packed matrix and converted to the decoder's dtype. So the weights are in memory once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

import torch

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.decoder import CpuDecoder, DecoderPeers, DecoderSharers
from eventlm.kernels.int8_linear import quantize_rows
from eventlm.models.config import read_model, resolve_dtype
from eventlm.models.cpu_kernels import native_model
from eventlm.models.decoder import Decoder
from eventlm.models.program import FLOAT32_WEIGHTS, WeightKey
from eventlm.models.rope import compiled_angles
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.cut_weights import cut_weights, used_files
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import matrix_types
from eventlm.models.weights.slices import ModelPart
from eventlm.models.weights.stored_weights import WeightFile
from eventlm.models.weights.weight_reader import check_quantized, read_pieces
from eventlm.types import OnProgress


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a resolved dtype name."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def find_checkpoint(folder: str | Path, part: ModelPart | None = None) -> tuple[ModelSpec, list[WeightFile]]:
    """The model of the checkpoint in `folder`, and the files with its weights, see `find_weights`.

    part: what to take of it; then that is the model, and the files have its weights.

    Raises CheckpointError before there is memory for any weight.
    """
    model = read_model(folder)
    files = find_weights(Path(folder), model)
    if part is None:
        check_quantized(files)
        return model, files
    check_quantized(used_files(files, part.slices))
    return part.model, cut_weights(files, part.slices)


def load_decoder(
    folder: str | Path,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    part: ModelPart | None = None,
    make: Callable[[ModelSpec], Decoder] = Decoder,
    on_progress: OnProgress | None = None,
) -> Decoder:
    """The decoder of the checkpoint in `folder`, ready to run. `on_progress` gets the bytes that were read.

    part: what to take of it. make: what it is made by.

    Raises CheckpointError naming the file and the tensor if one is missing, unexpected, cut short, or of another
    shape than config.json gives.
    """
    model, files = find_checkpoint(folder, part)
    with default_dtype(torch_dtype(resolve_dtype(model, dtype, quantization))):
        decoder = make(model)
    if quantization == "int8":
        decoder.to_int8()
    for key, first_row, values in read_pieces(files, on_progress):
        rows = slice(first_row, first_row + len(values))
        target, scales = decoder.target(key)
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
    part: ModelPart | None = None,
    peers: DecoderPeers | None = None,
    sharers: DecoderSharers | None = None,
    on_progress: OnProgress | None = None,
) -> CpuDecoder:
    """The decoder of the checkpoint in `folder`, its weights packed for a build of `eventlm.kernels.cpu`.

    part: what to take of it. peers: who has the other parts. sharers: who has the other parts of contexts.

    Raises CheckpointError, and calls `on_progress`, like `load_decoder`.
    """
    model, files = find_checkpoint(folder, part)
    types = matrix_types(files, model, quantization)
    # The others of them are rounded.
    kept = types if quantization == "none" else {}
    if quantization == "none":
        _say_what_is_unpacked(files, types)
    try:
        decoder = CpuDecoder(
            build,
            native_model(model),
            [compiled_angles(rope, max_positions) for rope in model.ropes],
            is_int8=quantization == "int8",
            types={(key.name, key.layer, key.expert): kind for key, kind in types.items()},
            peers=peers,
            sharers=sharers,
            num_threads=num_threads,
        )
        for key, first_row, values in read_pieces(files, on_progress, in_blocks=kept):
            if key in kept:
                decoder.load_packed(key.name, key.layer, values, first_row, key.expert)
            else:
                name = f"{key.name}_bias" if key.kind == "bias" else key.name
                decoder.load(name, key.layer, values, first_row, key.expert)
    except MemoryError as error:
        raise CheckpointError(
            f"{folder}: this machine gives neither its weights nor {num_threads} threads their memory; lower --threads "
            "or take a smaller model"
        ) from error
    return decoder


def _say_what_is_unpacked(files: Sequence[WeightFile], types: Container[WeightKey]) -> None:
    all_keys = (key for file in files for matrix in file.quantized for key in matrix.weights)
    keys = [key for key in all_keys if key.name not in FLOAT32_WEIGHTS]
    if unpacked := [key for key in keys if key not in types]:
        # The engine logs what a worker prints.
        print(
            f"{len(unpacked):,} of {len(keys):,} quantized matrices are unpacked to bfloat16: the compiled forward "
            "pass has no product for their format",
            file=sys.stderr,
        )


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors of floats are of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
