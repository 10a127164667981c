"""How the replicas of a recorded run were split into ranks."""

from __future__ import annotations

from eventlm.config.core import MAX_RANKS
from eventlm.core.shards import Layout
from eventlm.events import Header


def recorded_layouts(header: Header) -> list[Layout]:
    """Of each replica, by its number. The core does not know of tensor ranks: those are as configured, if a header says
    so, else there is one.
    """
    of_all = _tensor_ranks(header.config.get("parallel", {}).get("tensor_parallel_size"), 1)
    layouts = []
    for each in header.sets:
        own = header.config.get("replicasets", {}).get(each.name, {})
        tensor = _tensor_ranks(own.get("tensor_parallel_size") if isinstance(own, dict) else None, of_all)
        layouts += [Layout(tensor, each.core.stages, each.core.groups)] * each.core.num_replicas
    return layouts


def layouts_in_words(header: Header) -> str:
    """Of all replicas: "2 stages of 4 tensor ranks"; empty if each is one process."""
    words = {layout.describe() or "one process": None for layout in recorded_layouts(header)}
    return "" if list(words) == ["one process"] else "; ".join(words)


def _tensor_ranks(value: object, default: int) -> int:
    """A header may come from anywhere, and from any version."""
    return value if isinstance(value, int) and 1 <= value <= MAX_RANKS else default
