"""From `--model` to a folder that holds a checkpoint, pulling a known model or a repository at its first use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from eventlm.config import ModelConfig
from eventlm.config.options import nearest
from eventlm.errors import CheckpointError, PullError, UsageError
from eventlm.models.default import KNOWN_MODELS
from eventlm.models.hub import is_repo_id, pull_repo
from eventlm.models.pull import cache_folder, cached, pull
from eventlm.worker.protocol import FAKE_MODEL

#: What a GGUF file begins with.
_GGUF_MAGIC = b"GGUF"


class ModelSource(NamedTuple):
    """A model to run: its folder (None for the fake one), and the name that requests use."""

    folder: Path | None
    served_name: str


def find_model(config: ModelConfig, *, may_fetch: bool = True) -> ModelSource:
    """The model that the configuration names; one that is not cached is fetched first. A folder beats a repository.

    may_fetch: False where the name is nobody's wish who is here; then one that is not cached is an error.

    Raises CheckpointError where there is no checkpoint, PullError, and UsageError for `--fake` without the fake
    model and for `--revision` without a repository.
    """
    folder = Path(config.model).expanduser()
    if is_repo_id(config.model) and not folder.exists():
        return ModelSource(_repository(config, may_fetch=may_fetch), config.served_model_name or config.model)
    if config.revision:
        raise UsageError(
            f"--revision {config.revision}: --model {config.model} is no repository of the Hugging Face hub (ORG/NAME)"
        )
    if config.model == FAKE_MODEL:
        return ModelSource(None, config.served_model_name or FAKE_MODEL)
    if config.fake:
        raise _fake_parameters(config)
    if config.model in KNOWN_MODELS:
        return ModelSource(
            _cached_or_pulled(config.model, may_fetch=may_fetch), config.served_model_name or config.model
        )
    _check_folder(folder, config.model)
    return ModelSource(folder, config.served_model_name or folder.resolve().name)


def _repository(config: ModelConfig, *, may_fetch: bool) -> Path:
    if config.fake:
        raise _fake_parameters(config)
    try:
        return pull_repo(config.model, config.revision, may_fetch=may_fetch)
    except PullError as error:
        message = f"--model {config.model}: there is no such folder, and {error}"
        raise PullError(message, exit_code=error.exit_code) from error


def _fake_parameters(config: ModelConfig) -> UsageError:
    return UsageError(f"--fake is for the fake worker, but --model is {config.model!r}, not {FAKE_MODEL!r}")


def _cached_or_pulled(name: str, *, may_fetch: bool) -> Path:
    folder = cached(name)
    if folder is not None:
        return folder
    if not may_fetch:
        raise PullError(f"{name} is not in the cache {cache_folder()}; `eventlm pull {name}` fetches it")
    print(f"eventlm: {name} is not in the cache yet; fetching it once into {cache_folder()}", file=sys.stderr)
    return pull(name)


def _check_folder(folder: Path, given: str) -> None:
    known = ", ".join([*KNOWN_MODELS, FAKE_MODEL])
    wanted = "give the folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)"
    if folder.is_file() and _is_gguf(folder):
        raise CheckpointError(
            f"--model {given}: this is a GGUF file, and eventlm runs only safetensors checkpoints; take the repository "
            "that it was quantized from (ORG/NAME, or its folder), and --quantization int8 if memory is short"
        )
    if folder.is_file():
        raise CheckpointError(f"--model {given}: this is a file; {wanted}")
    if not folder.is_dir():
        guess = nearest(given, [*KNOWN_MODELS, FAKE_MODEL])
        suggestion = f"did you mean {guess}? Else " if guess else ""
        raise CheckpointError(f"--model {given}: no such folder; {suggestion}{wanted}, ORG/NAME or one of {known}")
    if not (folder / "config.json").is_file():
        below = sorted(path.parent.name for path in folder.glob("*/config.json"))
        hint = f"the folder {below[0]} in it has one" if below else wanted
        raise CheckpointError(f"--model {given}: there is no config.json in this folder; {hint}")


def _is_gguf(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return file.suffix.lower() == ".gguf"
