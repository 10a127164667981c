"""From the arguments of `LLM` to a composition: its engine, its tokenizer, its defaults."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eventlm.bootstrap.composition import Composition, compose
from eventlm.bootstrap.tokenizer_source import find_tokenizer_folder
from eventlm.config.load import load_config
from eventlm.config.options import options as known_options
from eventlm.errors import EventLMError, UsageError
from eventlm.worker.protocol import FAKE_MODEL

StrPath = str | os.PathLike[str]

_FLAG = re.compile(r"--[a-z][a-z-]*")


class Composed(NamedTuple):
    """A composition, and the folder that its tokenizer comes from: None for the fake one."""

    composition: Composition
    tokenizer_folder: Path | None


def in_keywords(message: str) -> str:
    """A message with the options as keywords of `LLM`: `kv_memory` where it says `--kv-memory`."""
    names = {option.flag: name for name, option in known_options().items()} | {"--tokenizer": "tokenizer"}
    return _FLAG.sub(lambda flag: names.get(flag[0], flag[0]), message)


@contextlib.contextmanager
def keywords_in_errors() -> Iterator[None]:
    """Let the errors that pass through call options what `LLM` calls them."""
    try:
        yield
    except EventLMError as error:
        error.args = (in_keywords(str(error)),)
        raise


def compose_from(options: Mapping[str, Any], *, tokenizer: StrPath | None = None) -> Composed:
    """What `compose` makes of options by name; those that are None have their defaults.

    `tokenizer`, if given, is another model whose tokenizer and end of sequence are used; `model` needs none then.
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
    """Where the tokenizer of another model lies that `model` is to be used with."""
    folder = find_tokenizer_folder(name)
    if folder is None or model == FAKE_MODEL:
        raise UsageError(f"tokenizer {name!r}: the fake model's tokenizer goes with the fake model, and with no other")
    # A record names it, and is read elsewhere.
    return str(folder.absolute())
