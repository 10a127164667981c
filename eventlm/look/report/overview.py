"""The head of a report: what ran, how much of it, under which settings, and on what machine."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from eventlm.core.recorded_layouts import layouts_in_words
from eventlm.formatting import counted
from eventlm.look.findings.finding import lost_workers
from eventlm.look.report.backends import num_failed
from eventlm.look.report.measures import Measures
from eventlm.look.words import percent, seconds
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import MarkKind
from eventlm.types import NANOSECONDS_PER_SECOND

_PPM = 1_000_000


def title(index: Index) -> str:
    """Of the page."""
    return f"{', '.join(index.header.model_names)}, run {index.header.run}"


def num_requests(index: Index) -> int:
    """Requests that arrived, each once whatever its samples."""
    return int((index.requests["index"] == 0).sum())


def details(index: Index, base_ns: int, *, is_part: bool = False) -> list[str]:
    """A line on the run. is_part: the index is a window of it."""
    header = index.header
    unix_ns = int(header.unix_start_ns)
    began = ""
    if unix_ns > 0:
        moment = datetime.fromtimestamp((unix_ns + base_ns) // NANOSECONDS_PER_SECOND, UTC)
        began = f"from {moment:%Y-%m-%d %H:%M:%S} UTC"
    first_s, next_s = index.facts.first_s, index.facts.next_s
    events = counted(next_s - first_s, "event")
    if (index.marks["kind"] == MarkKind.GAP).any():
        events = f"events {first_s:,} to {next_s - 1:,} with gaps"
    if is_part:
        events = f"a part of {events}"
    return [
        counted(num_requests(index), "request"),
        f"{seconds(max(index.facts.last_ns - base_ns, 0))}",
        began,
        f"{events}, {'decisions verified' if index.facts.is_verified else 'not verified'}",
        layouts_in_words(header),
        f"eventlm {header.code_version}",
    ]


def notices(index: Index, base_ns: int) -> list[dict[str, str]]:
    """What the reader must know of the log."""
    facts = index.facts
    found = [{"kind": "warning", "text": f"{_sentence(text)}."} for text in facts.warnings]
    if facts.missing:
        found.append({"kind": "warning", "text": f"{_sentence(facts.missing)}."})
    # Else they say how it ended.
    if not facts.is_ended and not facts.warnings:
        num_events = facts.next_s - facts.first_s
        found.append(
            {"kind": "note", "text": f"The run was still being written: these are its first {num_events:,} events."}
        )
    if not len(index.requests):
        found.append({"kind": "note", "text": "No request arrived."})
    if base_ns:
        found.append({"kind": "note", "text": f"Times count from {seconds(base_ns)} after the run's start."})
    return found


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def headline(index: Index, measures: Measures, base_ns: int) -> list[dict[str, str]]:
    """The figures that are asked for first."""
    requests, steps, attempts = index.requests, index.steps, index.attempts
    span_ns = max(index.facts.last_ns - base_ns, 1)
    is_done = _is_done(index)
    tokens = int(steps["emitted"][is_done].sum()) + int((attempts["total"] - attempts["before"]).sum())
    busy_ns = int(steps["busy_ns"][is_done].sum())
    is_launched = requests["launched_ns"] >= 0
    prompts = int(requests["prompt_tokens"][is_launched].sum())
    hits = int(requests["cached_tokens"][is_launched].sum())
    num_workers = sum(not core.forwards for core in index.header.cores_of_replicas())
    unfinished = int((requests["ended_ns"] < 0).sum())
    rejected = int((index.marks["kind"] == MarkKind.REJECTED).sum())
    found = [
        _figure("requests", f"{num_requests(index):,}", f"{rejected:,} rejected" if rejected else ""),
        _figure(
            "completed", f"{int(measures.is_complete.sum()):,}", f"{unfinished:,} unfinished" if unfinished else ""
        ),
    ]
    for name, text in (("ttft", "first token"), ("tpot", "per output token"), ("e2e", "end to end")):
        of = measures.distribution(name)
        if of is not None:
            found.append(_figure(f"p50 {text}", seconds(of.p50), f"p99 {seconds(of.p99)}"))
    found += [
        _figure("output tokens", f"{tokens:,}", f"{tokens * NANOSECONDS_PER_SECOND / span_ns:,.1f} a second"),
        _figure("prompt tokens admitted", f"{prompts:,}", f"{percent(hits * _PPM // max(prompts, 1))} from the cache"),
    ]
    if num_workers:
        busy_ppm = min(busy_ns * _PPM // (span_ns * num_workers), _PPM)
        found += [
            _figure("busy", percent(busy_ppm), f"{int(is_done.sum()):,} steps"),
            _figure("preemptions", f"{int((index.marks['kind'] == MarkKind.PREEMPTED).sum()):,}"),
        ]
    if num_workers < index.header.num_replicas:
        retries = int((attempts["retry_ns"] >= 0).sum())
        hedges = int(attempts["is_hedge"].sum())
        found += [
            _figure("attempts at backends", f"{len(attempts):,}", f"{hedges:,} hedges" if hedges else ""),
            _figure("failed attempts", f"{num_failed(index):,}", f"{retries:,} to be tried again"),
        ]
    found += [
        _figure("longest queue", f"{int(index.drains['waiting'].max(initial=0)):,}", "sequences"),
    ]
    return found


def _is_done(index: Index) -> NDArray[np.bool_]:
    """The steps that were completed, without those in flight where the log begins."""
    steps = index.steps
    found: NDArray[np.bool_] = (steps["done_s"] >= 0) & (steps["launch_s"] >= index.facts.first_s)
    return found


def _figure(label: str, value: str, note: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def endings(index: Index) -> list[dict[str, Any]]:
    """How sequences ended, the most frequent first."""
    reasons = index.requests["reason"].tolist()
    counts = Counter(index.name(reason) or "unfinished" for reason in reasons)
    return [{"reason": reason, "count": count} for reason, count in counts.most_common()]


def limits(index: Index) -> list[dict[str, str]]:
    """The plug-ins and the core's configuration of each replicaset, whose name is part of the section if there are
    several.
    """
    sets = index.header.sets
    found = []
    for each in sets:
        of_set = f"{each.name}: " if len(sets) > 1 else ""
        found += [
            {
                "section": f"{of_set}{record.kind}",
                "name": record.name,
                "value": ", ".join(f"{name}={_value(value)}" for name, value in record.parameters.items()),
            }
            for record in each.plugins
        ]
        found += [
            {"section": f"{of_set}core", "name": name, "value": _value(value)}
            for name, value in msgspec.to_builtins(each.core).items()
        ]
    return found


def settings(index: Index) -> list[dict[str, str]]:
    """The resolved configuration and the host, as the header has them."""
    header = index.header
    found = []
    for section, values in header.config.items():
        found += [{"section": section, "name": name, "value": _value(value)} for name, value in values.items()]
    # The first replicaset's workers are described with the machine.
    hosts = {"host": header.host} | {f"{each.name}: host": each.host for each in header.sets[1:]}
    for section, values in hosts.items():
        found += [{"section": section, "name": name, "value": _value(value)} for name, value in values.items()]
    return found


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value, ensure_ascii=False)


def replica_rows(index: Index, base_ns: int) -> list[dict[str, Any]]:
    """What each replica with workers did."""
    steps, marks, requests = index.steps, index.marks, index.requests
    span_ns = max(index.facts.last_ns - base_ns, 1)
    durations = np.diff(index.drains["ts"], append=index.facts.last_ns)
    lost = marks["replica"][lost_workers(index)]
    found = []
    sets = index.header.sets
    for replica, of in enumerate(index.header.sets_of_replicas()):
        if sets[of].core.forwards:
            continue
        own = (steps["replica"] == replica) & _is_done(index)
        num_steps = int(own.sum())
        busy_ns = int(steps["busy_ns"][own].sum())
        all_ns = int((steps["end_ns"] - steps["start_ns"])[own].sum())
        launched = (requests["replica"] == replica) & (requests["launched_ns"] >= 0)
        prompts = int(requests["prompt_tokens"][launched].sum())
        waiting = np.maximum(index.gauge_by_drain("waiting", replica), 0)
        running = np.maximum(index.gauge_by_drain("running", replica), 0)
        of_replica = marks["replica"] == replica
        found.append(
            {
                "replica": replica,
                "model": sets[of].core.models[0] if len(sets) > 1 else "",
                "sequences": int(launched.sum()),
                "steps": num_steps,
                "busyPpm": min(busy_ns * _PPM // span_ns, _PPM),
                "batch": round(float((steps["decodes"] + steps["chunks"])[own].mean()), 2) if num_steps else None,
                "stepNs": all_ns // num_steps if num_steps else None,
                "output": int(steps["emitted"][own].sum()),
                "hitPpm": int(requests["cached_tokens"][launched].sum()) * _PPM // prompts if prompts else None,
                "waiting": round(float((waiting * durations).sum()) / span_ns, 2),
                "running": round(float((running * durations).sum()) / span_ns, 2),
                "preemptions": int((of_replica & (marks["kind"] == MarkKind.PREEMPTED)).sum()),
                "lost": int((lost == replica).sum()),
            }
        )
    return found
