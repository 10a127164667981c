"""Two runs of one workload: their requests in pairs, latencies side by side."""

from __future__ import annotations

import json
from typing import Any

from msgspec import structs

from eventlm.replay.diff.diff import METRICS, SequenceDelta, TraceDiff, diff, read_side
from eventlm.types import OnProgress

_MAX_FIELDS = 60
_MAX_LARGEST = 40
_TIMES = ("ttft", "tpot", "e2e", "queue")


def compare(path: str, other: str, *, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """What differs between two runs, for the page. Raises as LogReader does."""
    sides = [read_side(each, on_progress=on_progress) for each in (path, other)]
    return as_object(diff(*sides))


def as_object(found: TraceDiff) -> dict[str, Any]:
    """Set-ups, distributions of each metric and the largest changes."""
    largest = {name: [_pair(each) for each in found.largest(name, _MAX_LARGEST)] for name in _TIMES}
    return {
        "a": _side(found, "a"),
        "b": _side(found, "b"),
        "header": [{"name": each.name, "a": _text(each.a), "b": _text(each.b)} for each in found.header[:_MAX_FIELDS]],
        "numPairs": found.num_pairs,
        "onlyA": len(found.only_a),
        "onlyB": len(found.only_b),
        "isIdentical": found.is_identical,
        "first": "" if found.first is None else found.first.what,
        "metrics": [
            {
                "metric": each.metric,
                "isTime": each.metric in _TIMES,
                "a": structs.asdict(each.a),
                "b": structs.asdict(each.b),
                "delta": structs.asdict(each.delta),
                "less": each.num_less,
                "more": each.num_more,
            }
            for each in found.metrics
        ],
        "largest": largest,
        "warnings": [*found.a.warnings, *found.b.warnings],
    }


def _side(found: TraceDiff, name: str) -> dict[str, Any]:
    side = getattr(found, name)
    return {"run": side.header.run, "requests": len(side.arrivals), "rejected": side.num_rejected}


def _text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _pair(each: SequenceDelta) -> dict[str, Any]:
    return {
        "pair": each.pair,
        "a": each.a.request,
        "b": each.b.request,
        "prompt": each.a.prompt_tokens,
        "values": {name: [getattr(each.a, METRICS[name]), getattr(each.b, METRICS[name])] for name in _TIMES},
    }
