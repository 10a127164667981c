"""Traces to read: a header, then whatever a run might have said, and an end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from eventlm.bus.log_writer import LogWriter
from eventlm.config import CoreConfig
from eventlm.events import (
    Admitted,
    Arrived,
    Emitted,
    End,
    Event,
    Finished,
    Header,
    Launched,
    PluginRecord,
    StepCompleted,
    TextEnded,
)
from eventlm.events.codec import chain, close_line, encode_body
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system
from eventlm.types import PluginKind

PLUGINS: list[tuple[PluginKind, str]] = [("policy", "fcfs"), ("batcher", "fixed"), ("router", "pull")]


def header(**changes: object) -> Header:
    core = CoreConfig(models=["m"], num_blocks=1024, max_model_len=2048)
    fields = {
        "run": "20250101-000000-abcdef",
        "unix_start_ns": "1735689600000000000",
        "code_version": "0.1.0",
        "core": core,
        "plugins": [PluginRecord(kind=kind, name=name, reference=f"eventlm.policies.{name}") for kind, name in PLUGINS],
        "predictor": [1, 2, 3, 4, 5],
    }
    return Header(**(fields | changes))


def events(num_events: int, *, rows: int = 4, seed: int = 0, end: bool = True) -> list[Event]:
    """A header, num_events - 1 events with up to `rows` rows each, the last of them an end."""
    rng = random.Random(seed)
    made: list[Event] = [header()]
    for s in range(1, num_events - end):
        made.append(_event(rng, s, rng.randint(1, rows)))
    if end:
        made.append(End(s=num_events - 1, ts=num_events * 1000))
    return made


def _event(rng: random.Random, s: int, rows: int) -> Event:
    at = {"s": s, "ts": s * 1000, "c": rng.randrange(s)}
    match rng.randrange(7):
        case 0:
            blocks = [rng.randrange(10**6) for _ in range(rows)]
            return Arrived(
                **at, p=1, prompt_tokens=16 * rows, blocks=blocks, max_tokens=64, scheduling=SchedulingParams(model="m")
            )
        case 1:
            return Admitted(**at, request=s)
        case 2:
            decodes = [(rng.randrange(10**5), 0, rng.randrange(2048), 1) for _ in range(rows)]
            step = {"replica": 0, "epoch": 1, "step": s}
            return Launched(**at, **step, decodes=decodes, num_tokens=rows, predicted_ns=rng.randrange(10**9))
        case 3:
            step = {"replica": 0, "epoch": 1, "step": s, "start_ns": s, "end_ns": s + 9}
            return StepCompleted(**at, p=1, **step, digest=f"{rng.getrandbits(64):016x}", produced=[1] * rows)
        case 4:
            return Emitted(**at, replica=0, step=s, num_tokens=rows)
        case 5:
            return TextEnded(**at, p=1, request=s, index=0, position=rows, reason='stop "é\n"')
        case _:
            return Finished(**at, request=s, index=0, reason="length", position=rows)


def lines(made: Sequence[Event], *, previous_h: str = "") -> list[bytes]:
    """The closed lines of a whole trace, newlines included."""
    closed = []
    for event in made:
        body = encode_body(event)
        previous_h = chain(previous_h, body)
        closed.append(close_line(body, previous_h))
    return closed


def write(path: Path, made: Sequence[Event]) -> list[bytes]:
    closed = lines(made)
    path.write_bytes(b"".join(closed))
    return closed


def record(folder: Path, run: str, made: Sequence[Event]) -> Path:
    """Write a trace as an engine does, and close it."""
    with LogWriter(real_system(), folder, run) as writer:
        for event in made:
            writer.append(encode_body(event))
    return writer.path
