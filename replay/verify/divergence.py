"""What a verification can find: stable codes, each with a cause and a remedy, and details of the first difference."""

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
    """A code's exit status, meaning and remedy."""

    exit_code: ExitCode
    cause: str
    remedy: str


_RERUN = (
    "run the versions of eventlm and of the plug-ins that the header names; if you do, check whether a plug-in of your "
    "own depends on a clock, on chance or on hidden state; else report it with the trace"
)


class Code(Enum):
    """Stable names of divergences."""

    MISSING_DECISION = Kind(ExitCode.DIFFERENT, "the replay made no decision where the trace has one", _RERUN)
    EXTRA_DECISION = Kind(ExitCode.DIFFERENT, "the replay made a decision that the trace does not have", _RERUN)
    DIFFERENT_DECISION = Kind(ExitCode.DIFFERENT, "the replay made another decision than the trace has", _RERUN)
    REORDERED_DECISION = Kind(ExitCode.DIFFERENT, "the replay made the same decisions in another order", _RERUN)
    STATE_DIGEST = Kind(ExitCode.DIFFERENT, "the decisions agree, but the states do not", _RERUN)
    SNAPSHOT = Kind(ExitCode.DIFFERENT, "the decisions agree, but the next segment starts from another state", _RERUN)
    CONFIG_DRIFT = Kind(
        ExitCode.DIFFERENT,
        "the replay has another configuration than the run",
        "none is needed if you asked for it; leave the change out to verify the run itself",
    )
    POLICY_DRIFT = Kind(
        ExitCode.DIFFERENT,
        "a plug-in is not the one that ran: you chose another, or its source has changed",
        "none is needed if you asked for it; else restore the recorded source",
    )
    TOKEN = Kind(
        ExitCode.DIFFERENT,
        "the model did not produce what it produced in the run",
        "use the host, software and number of threads that the header names, and the same model files; --teacher-force "
        "lists all differences",
    )
    SAFETY = Kind(ExitCode.INVARIANT, "the state broke an invariant of the core", "report it with the trace")
    LIVENESS = Kind(ExitCode.LIVENESS, "a sequence waits and nothing is in progress", "report it with the trace")
    GAP = Kind(
        ExitCode.GAP,
        "events were not recorded",
        "everything before the gap is verified, the rest cannot be",
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
    #: A sentence for each field that differs: name, recorded, replayed; of lists the first differing element.
    fields: list[str] = []
    #: One line for each event, from the difference back to the request.
    chain: list[str] = []
    #: The replayed state of what the difference names.
    state: list[str] = []


def as_object(event: Event) -> dict[str, Any]:
    """An event as the JSON object that its line holds, without the hash."""
    found: dict[str, Any] = msgspec.json.decode(encode_body(event) + b"}")
    return found


def one_line(event: Event, max_chars: int = 150) -> str:
    """An event's line without the hash, shortened."""
    return shortened((encode_body(event) + b"}").decode(), max_chars)


def shortened(text: str, max_chars: int) -> str:
    """At most so many characters."""
    return text if len(text) <= max_chars else text[: max_chars - 4] + " ..."


def differing_fields(recorded: dict[str, Any], replayed: dict[str, Any]) -> list[str]:
    """One sentence for each field that differs."""
    sentences = []
    for name in [*recorded, *(name for name in replayed if name not in recorded)]:
        before, after = recorded.get(name), replayed.get(name)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list):
            index = next((i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), None)
            if index is None:
                sentences.append(f"{name}: recorded {len(before)} entries, replayed {len(after)}")
            else:
                sentences.append(f"{name}[{index}]: recorded {before[index]}, replayed {after[index]}")
        else:
            before, after = ("nothing" if value is None else value for value in (before, after))
            sentences.append(f"{name}: recorded {before}, replayed {after}")
    return sentences


def requests_named(*objects: dict[str, Any] | None) -> list[int]:
    """Requests that one or two decisions name, each once, in order; of two launches only those of differing rows."""
    present = [item for item in objects if item is not None]
    found: dict[int, None] = {item["request"]: None for item in present if "request" in item}
    for name in ("decodes", "chunks", "forget"):
        for row in (row for item in present for row in item.get(name, [])):
            if len(present) == 1 or any(row not in item.get(name, []) for item in present):
                found[row[0]] = None
    return list(found)


def state_lines(core: Core, requests: list[int], *, limit: int = 6) -> list[str]:
    """The replay's state of some requests' sequences, and of its replicas."""
    state = core.state
    lines = []
    for seq in requests[:limit]:
        request = state.requests.get(seq)
        if request is None:
            lines.append(f"request {seq}: ended or never admitted")
        else:
            lines += [repr(sequence) for sequence in request.sequences[:4]]
    for replica in state.replicas:
        lines.append(
            f"replica {replica.index}: {'up' if replica.up else 'no worker'}, {len(replica.running)} running, "
            f"{len(replica.queue)} waiting, {len(replica.in_flight)} steps in flight, "
            f"{replica.pool.num_available} of {replica.pool.num_blocks} blocks available"
        )
    for replicaset in state.replicasets:
        of_set = f" of replicaset {replicaset.index}" if len(state.replicasets) > 1 else ""
        lines.append(f"shared queue{of_set}: {len(replicaset.shared_queue)} waiting; policy {replicaset.policy_name}")
    return lines


def classify(recorded: Sequence[Event], replayed: Sequence[Event]) -> Code:
    """The kind of a first difference, given all decisions from it to the end of its apply, of the trace and the replay.

    Positions are ignored, because one decision more or less shifts all that follow.
    """
    before, after = ([as_object(event) | {"s": 0} for event in events] for events in (recorded, replayed))
    is_known, is_wanted = before[0] in after, after[0] in before
    if is_known and is_wanted:
        return Code.REORDERED_DECISION
    if is_known:
        return Code.EXTRA_DECISION
    return Code.MISSING_DECISION if is_wanted else Code.DIFFERENT_DECISION
