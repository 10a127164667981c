"""What a verification can find: stable codes, each with a cause and a remedy, and the story of the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from eventlm.core.core import Core
from eventlm.errors import ExitCode
from eventlm.events import Event
from eventlm.events.codec import encode_body


class Kind(NamedTuple):
    """A code's exit status, what it means and what to do about it."""

    exit_code: ExitCode
    cause: str
    remedy: str


_RERUN = (
    "run the same version of eventlm and of the plug-ins as the header names; if they are, see whether a plug-in of "
    "your own decides by a clock, by chance or by what it remembers; else report it with the trace"
)


class Code(Enum):
    """Stable names of divergences."""

    MISSING_DECISION = Kind(ExitCode.DIFFERENT, "the replay made no decision where the trace has one", _RERUN)
    EXTRA_DECISION = Kind(ExitCode.DIFFERENT, "the replay made a decision that the trace does not have", _RERUN)
    DIFFERENT_DECISION = Kind(ExitCode.DIFFERENT, "the replay decided otherwise than the trace", _RERUN)
    REORDERED_DECISION = Kind(ExitCode.DIFFERENT, "the replay made the same decisions in another order", _RERUN)
    STATE_DIGEST = Kind(ExitCode.DIFFERENT, "the decisions agree, but the state behind them does not", _RERUN)
    SNAPSHOT = Kind(
        ExitCode.DIFFERENT, "the decisions agree, but the state that the next segment starts from is another", _RERUN
    )
    CONFIG_DRIFT = Kind(
        ExitCode.DIFFERENT,
        "the replay was given another configuration than the run",
        "none is needed if this is what you asked for; leave the change out to verify the run itself",
    )
    POLICY_DRIFT = Kind(
        ExitCode.DIFFERENT,
        "a plug-in is not the one that ran: another was asked for, or its source has changed",
        "none is needed if this is what you asked for; else restore the recorded source",
    )
    TOKEN = Kind(
        ExitCode.DIFFERENT,
        "the model did not give again what it gave in the run",
        "run it on the host, with the software and the threads that the header names, and the model's own files; "
        "--teacher-force lists all that differs",
    )
    SAFETY = Kind(ExitCode.INVARIANT, "the state broke an invariant of the core", "report it with the trace")
    LIVENESS = Kind(ExitCode.LIVENESS, "a sequence waits and nothing is under way", "report it with the trace")
    GAP = Kind(
        ExitCode.GAP,
        "events were not recorded",
        "what comes before the gap is verified; nothing can be said of the rest",
    )


class Divergence(Struct, frozen=True, kw_only=True):
    """The first difference. `recorded` and `replayed` are events as JSON objects, or None."""

    code: str
    exit_code: int
    cause: str
    remedy: str
    s: int
    line: int
    what: str
    #: The file of that line.
    path: str = ""
    recorded: dict[str, Any] | None = None
    replayed: dict[str, Any] | None = None
    #: Fields that differ: name, recorded, replayed; for lists the first differing place.
    fields: list[str] = []
    #: One line an event, from the difference back to the request.
    chain: list[str] = []
    #: The replayed state of what the difference names, and digests that differ.
    state: list[str] = []


def as_object(event: Event) -> dict[str, Any]:
    """An event as the JSON object that its line holds, without the hash."""
    found: dict[str, Any] = msgspec.json.decode(encode_body(event) + b"}")
    return found


def differing_fields(recorded: dict[str, Any], replayed: dict[str, Any]) -> list[str]:
    """One sentence for each field that differs."""
    sentences = []
    for name in [*recorded, *(name for name in replayed if name not in recorded)]:
        before, after = recorded.get(name), replayed.get(name)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list):
            place = next((i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), None)
            if place is None:
                sentences.append(f"{name}: recorded {len(before)} entries, replayed {len(after)}")
            else:
                sentences.append(f"{name}[{place}]: recorded {before[place]}, replayed {after[place]}")
        else:
            sentences.append(f"{name}: recorded {_or_nothing(before)}, replayed {_or_nothing(after)}")
    return sentences


def _or_nothing(value: Any) -> str:
    return "nothing" if value is None else str(value)


def requests_named(*objects: dict[str, Any] | None) -> list[int]:
    """Requests that decisions name, each once, in the order of their mention; of launches those rows that differ."""
    first, second = (*objects, None, None)[:2]
    if first is not None and second is not None:
        rows_differ = {
            name: [row for row in [*first.get(name, []), *second.get(name, [])]
                   if (row in first.get(name, [])) != (row in second.get(name, []))]
            for name in ("decodes", "chunks", "forget")
        }  # fmt: skip
        objects = (first | rows_differ, second | rows_differ)
    found: dict[int, None] = {}
    for item in objects:
        if item is None:
            continue
        if "request" in item:
            found[item["request"]] = None
        for name in ("decodes", "chunks", "forget"):
            for row in item.get(name, []):
                found[row[0]] = None
    return list(found)


def state_lines(core: Core, requests: list[int], *, limit: int = 6) -> list[str]:
    """How the replay sees the sequences of some requests, and its replicas."""
    state = core.state
    lines = []
    for seq in requests[:limit]:
        request = state.requests.get(seq)
        if request is None:
            lines.append(f"request {seq}: has ended or was never admitted")
        else:
            lines += [repr(sequence) for sequence in request.sequences[:4]]
    for replica in state.replicas:
        lines.append(
            f"replica {replica.index}: {'up' if replica.up else 'no worker'}, {len(replica.running)} running, "
            f"{len(replica.queue)} waiting, {len(replica.in_flight)} steps in flight, "
            f"{replica.pool.num_available} of {replica.pool.num_blocks} blocks available"
        )
    lines.append(f"shared queue: {len(state.shared_queue)} waiting; policy {state.policy_name}")
    return lines


def classify(recorded: Sequence[Event], replayed: Sequence[Event]) -> Code:
    """What a first difference is, given all decisions from it to the end of its apply, of the trace and the replay.

    Positions do not count: one decision more or less moves all that follow.
    """
    before, after = ([as_object(event) | {"s": 0} for event in events] for events in (recorded, replayed))
    is_known, is_wanted = before[0] in after, after[0] in before
    if is_known and is_wanted:
        return Code.REORDERED_DECISION
    if is_known:
        return Code.EXTRA_DECISION
    return Code.MISSING_DECISION if is_wanted else Code.DIFFERENT_DECISION
