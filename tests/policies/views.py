"""Views to ask plug-ins about."""

from __future__ import annotations

from typing import Any

from eventlm.core.plugin import ReplicaView, SequenceView


def view(**fields: Any) -> SequenceView:
    """A waiting sequence that arrived at 0 with a prompt of 100 tokens and 10 ms of prefill, unless said otherwise."""
    defaults = {
        "request": 1,
        "index": 0,
        "priority": 0,
        "arrival_ns": 0,
        "deadline_ns": 0,
        "prompt_tokens": 100,
        "prefill_ns": 10_000_000,
        "service_class": "",
        "session": 0,
    }
    fields = defaults | fields
    return SequenceView(**{"remaining_ns": fields["prefill_ns"]} | fields)


def replica(index: int, **fields: int) -> ReplicaView:
    """A replica with nothing to do, unless said otherwise."""
    names = ("num_waiting", "num_running", "waiting_tokens", "admitted_tokens", "available_blocks")
    return ReplicaView(index=index, **dict.fromkeys(names, 0) | fields)
