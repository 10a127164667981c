"""Who computes a model, eventlm or transformers. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from eventlm.errors import CheckpointError
from eventlm.models.config import UnknownArchitectureError, read_model, stored_dtype
from eventlm.models.gguf.source import read_source
from eventlm.models.transformers_model import ServedModel, TransformersModel, read_in_child
from eventlm.types import ModelImpl


def read_served(
    folder: str | Path, impl: ModelImpl, ask: Callable[[Path], TransformersModel] = read_in_child
) -> ServedModel:
    """The model in `folder` for a value of `--model-impl`.

    With `auto`, transformers computes what eventlm does not know. ask: finds out what transformers makes of it.
    Raises CheckpointError.
    """
    folder = Path(folder)
    if impl == "transformers":
        return _of_transformers(folder, ask)
    try:
        return read_model(folder)
    except UnknownArchitectureError as error:
        if impl == "eventlm" or read_source(folder) is not None:
            raise
        try:
            return _of_transformers(folder, ask)
        except CheckpointError as other:
            reason = str(other).removeprefix(f"{folder / 'config.json'}: ")
            raise CheckpointError(f"{error}; {reason}") from other


def _of_transformers(folder: Path, ask: Callable[[Path], TransformersModel]) -> TransformersModel:
    if read_source(folder) is not None:
        raise CheckpointError(f"{folder}: transformers does not compute GGUF files here; leave --model-impl out")
    model = ask(folder)
    return model if model.dtype else msgspec.structs.replace(model, dtype=stored_dtype(folder))
