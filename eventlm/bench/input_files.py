"""Files that a load test is given: prompts (`--dataset`), and arrivals with lengths (`--trace`).

Prompts. `.txt`: a prompt a line. `.jsonl`: an object a line with `prompt` (a text) or `messages` (a conversation in
OpenAI's shape), and optionally `max_tokens` or `output_tokens`. `.json`: a list of such objects, or of ShareGPT's with
`conversations` of `from` and `value`: the first message is the prompt, the answer to it gives the output's length.

Arrivals. A CSV file with a header line, JSON lines or a workload file (`eventlm trace import` makes them), with the
columns `arrival_s` (seconds, from any origin), `prompt_tokens` and `output_tokens`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from eventlm.bench.records import Messages
from eventlm.errors import UsageError

_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")


class DatasetPrompt(Struct, frozen=True):
    """One prompt: a text or a conversation. `max_tokens` None: as given on the command line.

    The length of `answer` is the output's, if the file has no number.
    """

    content: str | Messages
    max_tokens: int | None = None
    answer: str = ""


def read_prompts(path: str) -> list[DatasetPrompt]:
    """The prompts of a file, at least one. Raises UsageError that says where it is wrong."""
    text = _read("--dataset", path)
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
    for index, entry in enumerate(entries):
        # ShareGPT has conversations of one message, without an answer.
        if not (isinstance(entry, dict) and len(entry.get("conversations", [1, 2])) < 2):
            prompts.append(_prompt(f"{path}: entry {index}", entry))
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


class Arrival(NamedTuple):
    """A request of a trace; `arrival_s` counts from the first arrival."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def read_arrivals(path: str) -> list[Arrival]:
    """A trace's requests in the order of their arrival, at least one. Raises UsageError that says where it is wrong."""
    text = _read("--trace", path)
    arrivals = [_arrival(f"--trace {path}:{number}", row) for number, row in _rows(path, text)]
    if not arrivals:
        raise UsageError(f"--trace {path}: there is no request in this file")
    arrivals.sort()
    first_s = arrivals[0].arrival_s
    return [arrival._replace(arrival_s=arrival.arrival_s - first_s) for arrival in arrivals]


def _rows(path: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line numbers and rows by column."""
    if not text.lstrip().startswith("{"):
        reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
        yield from ((reader.line_num, row) for row in reader)
        return
    for number, line in _lines(text):
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise UsageError(f"--trace {path}:{number}: {error}") from error
        # Of a workload file the first line says what it is, and incidents have a tag too. Neither is a request.
        if "t" not in row:
            yield number, row


def _arrival(where: str, row: Mapping[str, Any]) -> Arrival:
    if not all(column in row for column in _COLUMNS):
        raise UsageError(f"{where}: the columns are {', '.join(map(str, row))}, but needed are {', '.join(_COLUMNS)}")
    arrival_s, prompt_tokens, output_tokens = (row[column] for column in _COLUMNS)
    try:
        found = Arrival(float(arrival_s), int(prompt_tokens), int(output_tokens))
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{column}={row[column]!r}" for column in _COLUMNS)
        raise UsageError(f"{where}: expected numbers, got {given}") from error
    if not math.isfinite(found.arrival_s) or found.prompt_tokens < 1 or found.output_tokens < 1:
        raise UsageError(f"{where}: a time must be finite, and lengths at least 1 token")
    return found


def _read(flag: str, path: str) -> str:
    """The text of a UTF-8 file, with or without a byte order mark. Raises UsageError that names the flag."""
    try:
        return Path(path).expanduser().read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path}: this is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror or error}") from error
