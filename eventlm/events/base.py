"""The common fields of all events, and the three kinds of event.

A **fact** came from outside and is authoritative. A **decision** is what the core concluded from the facts; a replay
computes it again and compares. A **marker** only annotates. All three are stamped with a gapless `s`, a logical time
`ts` and a cause `c`, and are delivered in that one order.
"""

from __future__ import annotations

from msgspec import Struct

#: Times of a run are below this: 292 years. Readers with 64-bit integers read them exactly. Those with floats, such
#: as jq, round times after 2^53 ns (104 days) to a few nanoseconds.
TIME_LIMIT_NS = 1 << 63


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="t"):
    """One entry of the log. `t` is a stable tag, never a class path.

    s: position in the log, gapless from 0 (the header).
    ts: nanoseconds since the run started, below `TIME_LIMIT_NS`, the same for all facts that were drained together.
    c: the `s` of the event that led to this one; 0, the header, where nothing in the log did.
    """

    s: int = 0
    ts: int = 0
    c: int = 0


class Fact(Event, frozen=True, kw_only=True):
    """Came from outside. `p` is 1 on the last fact of a drain: plans are made there and nowhere else."""

    p: int = 0


class Decision(Event, frozen=True, kw_only=True):
    """Concluded by the core, recomputed and compared by a replay."""


class Marker(Event, frozen=True, kw_only=True):
    """Annotates the log; changes nothing in the state."""
