"""From `--model` or `--tokenizer` to a folder, pulling a known model or a repository at its first use."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from eventlm.config import ModelConfig
from eventlm.config.options import nearest
from eventlm.errors import CheckpointError, PullError, UsageError
from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.models.fetch.default_model import KNOWN_MODELS
from eventlm.models.fetch.hub import is_repo_id, pull_repo
from eventlm.models.fetch.pull import cached, pull
from eventlm.worker.protocol import FAKE_MODEL

#: End of the name of a GGUF file, and what it begins with.
_GGUF_SUFFIX, _GGUF_MAGIC = ".gguf", b"GGUF"
#: What is left of a model's name that says which part of it a file is.
_PART = re.compile(r"-\d{5}-of-\d{5}$")


class ModelSource(NamedTuple):
    """A model to run: its folder (None for the fake one), and the name that requests use."""

    folder: Path | None
    served_name: str


def find_model(config: ModelConfig, *, may_fetch: bool = True) -> ModelSource:
    """The model that the configuration names; one that is not cached is fetched first. A folder beats a repository.

    may_fetch: False if the name comes from a trace; then one that is not cached is an error.

    Raises CheckpointError where there is no checkpoint, PullError, and UsageError for `--fake` without the fake
    model and for `--revision` without a repository.
    """
    given, folder = config.model, Path(config.model).expanduser()
    is_repository = is_repo_id(given) and not folder.exists()
    if config.revision and not is_repository:
        where = f"--revision {config.revision}: --model {given}"
        raise UsageError(f"{where} is no repository of the Hugging Face hub (ORG/NAME)")
    if config.fake and given != FAKE_MODEL:
        raise UsageError(f"--fake is for the fake worker, but --model is {given!r}, not {FAKE_MODEL!r}")
    if is_repository:
        found: Path | None = _pulled_repo("--model", given, config.revision, may_fetch=may_fetch)
    elif given == FAKE_MODEL:
        found = None
    elif given in KNOWN_MODELS:
        found = _cached_or_pulled(given, may_fetch=may_fetch)
    elif folder.is_file() and _is_gguf(folder):
        found, given = _folder_of_gguf(folder), _PART.sub("", folder.stem)
    else:
        _check_folder(folder, given)
        found, given = folder, folder.resolve().name
    return ModelSource(found, config.served_model_name or given)


def _pulled_repo(flag: str, name: str, revision: str = "", **how: bool) -> Path:
    try:
        found = pull_repo(name, revision, **how)
    except PullError as error:
        message = f"{flag} {name}: there is no such folder, and {error}"
        raise PullError(message, exit_code=error.exit_code) from error
    return _folder_of_gguf(found) if found.is_file() else found


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
    if folder.is_file():
        raise CheckpointError(f"--model {given}: this is a file, and no GGUF file; {wanted}")
    if not folder.is_dir():
        guess = nearest(given, [*KNOWN_MODELS, FAKE_MODEL])
        suggestion = f"did you mean {guess}? Else " if guess else ""
        missing = "no such file" if folder.suffix == _GGUF_SUFFIX else "no such folder"
        raise CheckpointError(
            f"--model {given}: {missing}; {suggestion}{wanted}, a GGUF file, ORG/NAME or one of {known}"
        )
    if not (folder / "config.json").is_file():
        below = sorted(path.parent.name for path in folder.glob("*/config.json"))
        files = sorted(path.name for path in folder.glob(f"*{_GGUF_SUFFIX}"))
        hint = f"the folder {below[0]} in it has one" if below else f"{wanted} or a GGUF file"
        if files:
            hint = f"to run {files[0]}, give its path"
        raise CheckpointError(f"--model {given}: there is no config.json in this folder; {hint}")


def _folder_of_gguf(file: Path) -> Path:
    # It loads numpy, which only such files cost.
    from eventlm.models.fetch.gguf_folder import gguf_folder

    return gguf_folder(file)


def _is_gguf(file: Path) -> bool:
    """Whether a file has the beginning or the name of a GGUF file. It may still be damaged."""
    if file.suffix.lower() == _GGUF_SUFFIX:
        return True
    try:
        with file.open("rb") as opened:
            return opened.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return False


def find_tokenizer_folder(given: str) -> Path | None:
    """The folder with the tokenizer.json of `given`: a folder, a GGUF file or a model's name. None for the fake model.

    Of a repository of the Hugging Face hub no weights are fetched. Raises UsageError or CheckpointError where there
    is no such tokenizer, and PullError.
    """
    if given == FAKE_MODEL:
        return None
    if given in KNOWN_MODELS:
        return find_model(ModelConfig(model=given)).folder
    folder = Path(given).expanduser()
    if is_repo_id(given) and not folder.exists():
        return _pulled_repo("--tokenizer", given, with_weights=False)
    if folder.is_file() and _is_gguf(folder):
        return _folder_of_gguf(folder)
    names = ", ".join([*KNOWN_MODELS, FAKE_MODEL])
    wanted = f"give a folder with a tokenizer.json, a repository of the Hugging Face hub (ORG/NAME), or one of {names}"
    if not folder.is_dir():
        found = "this is a file" if folder.exists() else "no such folder"
        raise UsageError(f"--tokenizer {given}: {found}; {wanted}")
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"--tokenizer {given}: this folder has no tokenizer.json; {wanted}")
    return folder
