"""The tokenizer of a served model, where it can be had on this machine."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from eventlm.bootstrap.tokenizer_source import find_tokenizer_folder
from eventlm.models.default import KNOWN_MODELS
from eventlm.models.hub import is_repo_id
from eventlm.models.pull import cached
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.tokenizer import CheckpointTokenizer, Tokenizer
from eventlm.worker.protocol import FAKE_MODEL

_FILE = "tokenizer.json"


def find_tokenizer(given: str, served_model: str) -> Tokenizer | None:
    """The tokenizer `given` (a folder or a model's name), else the served model's if it lies here, else None.

    Nothing is fetched that was not asked for, and of a repository of the Hugging Face hub no weights.
    Raises UsageError, CheckpointError or PullError for what is given and cannot be had.
    """
    if not given:
        return _of_served_model(served_model)
    folder = find_tokenizer_folder(given)
    return FakeTokenizer() if folder is None else CheckpointTokenizer(folder)


def _of_served_model(name: str) -> Tokenizer | None:
    if name == FAKE_MODEL:
        return FakeTokenizer()
    folder: Path | None = None
    if name in KNOWN_MODELS:
        folder = cached(name)
    elif Path(name).is_absolute():
        folder = Path(name)
    elif is_repo_id(name) and isinstance(path := huggingface_hub.try_to_load_from_cache(name, _FILE), str):
        folder = Path(path).parent
    return CheckpointTokenizer(folder) if folder is not None and (folder / _FILE).is_file() else None
