"""Token logs as tests see them: what they say, and what a trace says that they do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eventlm.bus.log_reader import LogReader
from eventlm.bus.token_log_reader import open_token_log
from eventlm.events import Arrived, Header, StepCompleted
from eventlm.events.codec import chain, close_line
from tests.replay.traces import read_objects


def facts_without_tokens(run_folder: Path) -> list[int]:
    """The arrivals and completions of a run whose lines in the token log are not there or not sound."""
    missing = []
    with LogReader(run_folder) as reader, contextlib.ExitStack() as stack:
        for line in reader:
            event = line.event()
            if isinstance(event, Header):
                token_log = stack.enter_context(open_token_log(line.path, event))
            elif isinstance(event, Arrived):
                missing += [event.s] if token_log.prompt(event) is None else []
            elif isinstance(event, StepCompleted):
                missing += [event.s] if token_log.outputs(event) is None else []
            assert not token_log.damage
    return missing


def write_objects(path: Path, objects: Sequence[dict[str, Any]]) -> None:
    """Write lines whose hashes are right."""
    h = objects[0].get("previous_h", "")
    lines = []
    for item in objects:
        body = msgspec.json.encode(item)[:-1]
        h = chain(h, body)
        lines.append(close_line(body, h))
    path.write_bytes(b"".join(lines))


def tamper(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change a token log as somebody who can compute hashes."""
    objects = read_objects(path)
    change(objects)
    write_objects(path, objects)
