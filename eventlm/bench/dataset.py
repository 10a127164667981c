"""Prompts from a file.

`.txt`: a prompt a line. `.jsonl`: an object a line with `prompt` (a text) or `messages` (a conversation in OpenAI's
shape), and optionally `max_tokens` or `output_tokens`. `.json`: a list of such objects, or of ShareGPT's, whose
`conversations` have `from` and `value`: the first message is the prompt, the answer to it gives the output's length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eventlm.bench.records import Messages
from eventlm.bench.text_file import read_text_file
from eventlm.errors import UsageError


class DatasetPrompt(Struct, frozen=True):
    """One prompt: a text or a conversation. `max_tokens` None: as the command line says.

    `answer` is a text whose length is to be the output's, where the file has no number.
    """

    content: str | Messages
    max_tokens: int | None = None
    answer: str = ""


def read_prompts(path: str) -> list[DatasetPrompt]:
    """The prompts of a file, at least one. Raises UsageError that says where it is wrong."""
    text = read_text_file("--dataset", path)
    match Path(path).suffix.lower():
        case ".jsonl":
            prompts = [_from_json_line(f"{path}:{number}", line) for number, line in _lines(text)]
        case ".json":
            prompts = _from_json(path, text)
        case _:
            prompts = [DatasetPrompt(line.strip()) for _, line in _lines(text)]
    if not prompts:
        raise UsageError(f"--dataset {path}: there is no prompt in this file")
    return prompts


def _lines(text: str) -> list[tuple[int, str]]:
    """Lines that are not blank, with their numbers."""
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _from_json_line(where: str, line: str) -> DatasetPrompt:
    try:
        return _prompt(where, msgspec.json.decode(line))
    except msgspec.DecodeError as error:
        raise UsageError(f"--dataset {where}: {error}") from error


def _from_json(path: str, text: str) -> list[DatasetPrompt]:
    try:
        entries = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise UsageError(f"--dataset {path}: {error}") from error
    if not isinstance(entries, list):
        raise UsageError(f"--dataset {path}: expected a list of prompts; an object a line goes into a .jsonl file")
    prompts = []
    for place, entry in enumerate(entries):
        # ShareGPT has conversations of one message, which nobody answered.
        if not (isinstance(entry, dict) and len(entry.get("conversations", [1, 2])) < 2):
            prompts.append(_prompt(f"{path}: entry {place}", entry))
    return prompts


def _prompt(where: str, entry: Any) -> DatasetPrompt:
    if isinstance(entry, str) and entry:
        return DatasetPrompt(entry)
    if not isinstance(entry, dict):
        raise UsageError(f"--dataset {where}: expected an object with `prompt` or `messages`")
    max_tokens = entry.get("max_tokens", entry.get("output_tokens"))
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise UsageError(f"--dataset {where}: max_tokens is {max_tokens!r}, not a number of at least 1")
    match entry:
        case {"prompt": str(text)} if text:
            return DatasetPrompt(text, max_tokens)
        case {"messages": [_, *_] as messages} if all(isinstance(message, dict) for message in messages):
            return DatasetPrompt(messages, max_tokens)
        case {"conversations": [{"value": str(text)}, {"value": str(answer)}, *_]} if text:
            return DatasetPrompt(text, max_tokens, answer)
    raise UsageError(f"--dataset {where}: there is neither a `prompt` (a text) nor `messages` (a list of objects)")
