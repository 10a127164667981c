"""Composes an engine from the arguments of `LLM`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eventlm.bootstrap.composition import Composition, compose
from eventlm.bootstrap.model_source import find_tokenizer_folder
from eventlm.config.load import load_config
from eventlm.config.options import options as known_options
from eventlm.errors import EventLMError, UsageError
from eventlm.worker.protocol import FAKE_MODEL

StrPath = str | os.PathLike[str]

_FLAG = re.compile(r"--[a-z][a-z-]*")


class Composed(NamedTuple):
    """A composition and the folder of its tokenizer, None for the fake one."""

    composition: Composition
    tokenizer_folder: Path | None


def in_keywords(message: str) -> str:
    """A message with keywords of `LLM` in place of flags: `kv_memory` for `--kv-memory`."""
    names = {option.flag: name for name, option in known_options().items()} | {"--tokenizer": "tokenizer"}
    return _FLAG.sub(lambda flag: names.get(flag[0], flag[0]), message)


@contextlib.contextmanager
def keywords_in_errors() -> Iterator[None]:
    """Put keywords of `LLM` in place of flags in errors that pass through."""
    try:
        yield
    except EventLMError as error:
        error.args = (in_keywords(str(error)),)
        raise


def compose_from(options: Mapping[str, Any], *, tokenizer: StrPath | None = None) -> Composed:
    """Compose an engine from options by name; None means the default.

    `tokenizer`, if given, is another model whose tokenizer and end of sequence are used.
    Raises UsageError, CheckpointError or PullError.
    """
    given = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in options.items()
        if value is not None
    }
    config = load_config(None, given, are_flags=False)
    folder = "" if tokenizer is None else _tokenizer_folder(config.model.model, os.fspath(tokenizer))
    composition = compose(config, tokenizer_folder=folder)
    model = composition.engine.setup.model
    return Composed(composition, None if model == FAKE_MODEL else Path(folder or model))


def _tokenizer_folder(model: str, name: str) -> str:
    """The folder of another model's tokenizer, to be used with `model`."""
    folder = find_tokenizer_folder(name)
    if folder is None or model == FAKE_MODEL:
        raise UsageError(f"tokenizer {name!r}: the fake model's tokenizer goes with the fake model, and with no other")
    # A record names it, and is read elsewhere.
    return str(folder.absolute())
