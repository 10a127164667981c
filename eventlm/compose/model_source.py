"""From `--model` to a folder that holds a checkpoint, pulling a known model at its first use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from eventlm.config import ModelConfig
from eventlm.config.options import nearest
from eventlm.errors import CheckpointError, UsageError
from eventlm.models.default import KNOWN_MODELS
from eventlm.models.pull import cache_folder, cached, pull

FAKE_MODEL = "fake"


class ModelSource(NamedTuple):
    """A model to run: its folder (None for the fake one), and the name that requests use."""

    folder: Path | None
    served_name: str


def find_model(config: ModelConfig) -> ModelSource:
    """The model that the configuration names; a known one that is not cached is fetched first.

    Raises CheckpointError where there is no checkpoint, PullError, and UsageError for `--fake` without the fake
    model.
    """
    if config.model == FAKE_MODEL:
        return ModelSource(None, config.served_model_name or FAKE_MODEL)
    if config.fake:
        raise UsageError(f"--fake is for the fake worker, but --model is {config.model!r}, not {FAKE_MODEL!r}")
    if config.model in KNOWN_MODELS:
        return ModelSource(_cached_or_pulled(config.model), config.served_model_name or config.model)
    folder = Path(config.model).expanduser()
    _check_folder(folder, config.model)
    return ModelSource(folder, config.served_model_name or folder.resolve().name)


def _cached_or_pulled(name: str) -> Path:
    folder = cached(name)
    if folder is not None:
        return folder
    print(f"eventlm: {name} is not in the cache yet; fetching it once into {cache_folder()}", file=sys.stderr)
    return pull(name)


def _check_folder(folder: Path, given: str) -> None:
    known = ", ".join([*KNOWN_MODELS, FAKE_MODEL])
    wanted = "give the folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)"
    if folder.is_file():
        raise CheckpointError(f"--model {given}: this is a file; {wanted}")
    if not folder.is_dir():
        guess = nearest(given, [*KNOWN_MODELS, FAKE_MODEL])
        suggestion = f"did you mean {guess}? Else " if guess else ""
        raise CheckpointError(f"--model {given}: no such folder; {suggestion}{wanted} or one of {known}")
    if not (folder / "config.json").is_file():
        below = sorted(path.parent.name for path in folder.glob("*/config.json"))
        hint = f"the folder {below[0]} in it has one" if below else wanted
        raise CheckpointError(f"--model {given}: there is no config.json in this folder; {hint}")
