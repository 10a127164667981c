"""The weights of a decoder in a checkpoint's files, found and checked by the headers before any is read.

Loads no torch, so that a folder is checked before a worker starts.
"""

from __future__ import annotations

from pathlib import Path

from eventlm.models.gguf.source import read_source
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.gguf_weights import find_in_gguf
from eventlm.models.weights.safetensors_weights import find_in_safetensors
from eventlm.models.weights.stored_weights import WeightFile


def find_weights(folder: Path, model: ModelSpec) -> list[WeightFile]:
    """The files of a checkpoint with the decoder's weights.

    Raises CheckpointError, naming the file and the tensor, unless each is there once with a dtype and shape that fit.
    """
    source = read_source(folder)
    return find_in_safetensors(folder, model) if source is None else find_in_gguf(source, model)
