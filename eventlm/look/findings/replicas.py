"""Findings about replicas, plug-ins and the engine: imbalance, lost hits, lost workers, what fails or dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from eventlm.formatting import counted
from eventlm.look.findings.finding import Finding, RunColumns, lost_workers
from eventlm.look.words import percent, seconds
from eventlm.replay.index.tables import MarkKind
from eventlm.types import NANOSECONDS_PER_SECOND

#: One replica has nothing to do while sequences wait for another, for this share of the run.
_IDLE_PPM = 80_000
_MIN_IDLE_NS = NANOSECONDS_PER_SECOND // 2
#: Prompt tokens that another replica's cache held, of all.
_LOST_HITS_PPM = 200_000
_MIN_LOST_TOKENS = 1000
_MAX_NAMED = 20


def find_imbalance(run: RunColumns) -> Iterator[Finding]:
    """A replica has nothing to do while sequences wait for another."""
    if len(run.replicas) < 2:
        return
    running = np.stack([run.gauge("running", replica) for replica in run.replicas])
    waiting = np.stack([run.gauge("waiting", replica) for replica in run.replicas])
    is_idle = (running == 0) & (waiting == 0)
    is_one_sided = is_idle.any(axis=0) & (waiting > 0).any(axis=0)
    idle_ns = run.time(is_one_sided)
    share = run.share_ppm(idle_ns, run.total_ns)
    if share < _IDLE_PPM or idle_ns < _MIN_IDLE_NS:
        return
    steps = run.index.steps
    busy = [int(run.step_ns[steps["replica"] == replica].sum()) for replica in run.replicas]
    most, least = (run.replicas[place(busy)] for place in (np.argmax, np.argmin))
    at = int(np.flatnonzero(is_one_sided)[0])
    queued = run.waited_ns * (run.index.requests["replica"] == most)
    yield Finding(
        kind="imbalance",
        title=f"Sequences wait for replica {most} while replica {least} has nothing to do",
        text=f"For {percent(share)} of the run ({seconds(idle_ns)}) a replica was idle while sequences waited for "
        f"another. Replica {most} computed {seconds(max(busy))}, replica {least} {seconds(min(busy))}.",
        culprit=run.plugin("router"),
        impact_ppm=share,
        figures={"idle_ns": idle_ns, "idle_share_ppm": share, "most_busy_ns": max(busy), "least_busy_ns": min(busy)},
        requests=run.identities(np.argsort(-queued, kind="stable")[:_MAX_NAMED]),
        s=int(run.index.drains["s"][at]),
        ts=int(run.index.drains["ts"][at]),
        command="show queue",
    )


def find_lost_hits(run: RunColumns) -> Iterator[Finding]:
    """Prompts are computed on one replica although another's cache held them."""
    requests = run.index.requests
    better = run.launched & (requests["best_hit_replica"] >= 0) & (requests["best_hit_replica"] != requests["replica"])
    lost = np.where(better, np.maximum(requests["best_hit_tokens"] - requests["cached_tokens"], 0), 0)
    num_lost = int(lost.sum())
    share = run.share_ppm(num_lost, int(requests["prompt_tokens"][run.launched].sum()))
    if len(run.replicas) < 2 or share < _LOST_HITS_PPM or num_lost < _MIN_LOST_TOKENS:
        return
    rows = np.argsort(-lost, kind="stable")[:_MAX_NAMED]
    hits_ppm = run.share_ppm(
        int(requests["cached_tokens"][run.launched].sum()), int(requests["prompt_tokens"][run.launched].sum())
    )
    yield Finding(
        kind="lost_hits",
        title="Prompts are sent to replicas whose caches do not have them",
        text=f"{num_lost:,} prompt tokens, {percent(share)} of all, were in another replica's cache when their "
        f"requests arrived; {percent(hits_ppm)} were hit. {counted(int((lost > 0).sum()), 'sequence')} lost cache "
        f"hits this way. {_of_worst(run, int(rows[0]))}",
        culprit=run.plugin("router"),
        impact_ppm=share,
        figures={"lost_tokens": num_lost, "lost_ppm": share, "hit_ppm": hits_ppm},
        requests=run.identities(rows),
        s=int(requests["request"][rows[0]]),
        ts=int(requests["arrived_ns"][rows[0]]),
    )


def _of_worst(run: RunColumns, row: int) -> str:
    requests = run.index.requests
    of = {
        name: int(requests[name][row])
        for name in ("request", "replica", "cached_tokens", "prompt_tokens", "best_hit_replica", "best_hit_tokens")
    }
    return (
        f"Request {of['request']} went to replica {of['replica']}, which had {of['cached_tokens']:,} of its "
        f"{of['prompt_tokens']:,} prompt tokens; replica {of['best_hit_replica']} had {of['best_hit_tokens']:,}."
    )


def find_lost_workers(run: RunColumns) -> Iterator[Finding]:
    """Workers died or went out of step."""
    marks = run.index.marks
    rows = lost_workers(run.index)
    if not len(rows):
        return
    reasons = Counter(run.index.name(text) or "another length of a sequence" for text in marks["text"][rows].tolist())
    is_preempted = marks["kind"] == MarkKind.PREEMPTED
    lost = [number for number, name in enumerate(run.index.names) if name == "lost"]
    num_preempted = int((is_preempted & np.isin(marks["text"], lost)).sum())
    num_failed = int((marks["kind"] == MarkKind.FAILED).sum())
    yield Finding(
        kind="worker_lost",
        title=f"{counted(len(rows), 'worker')} lost",
        text=f"Most often: {reasons.most_common(1)[0][0]}. {counted(num_preempted, 'sequence')} had to begin again, "
        f"{counted(num_failed, 'sequence')} ended with an error.",
        culprit=_who(marks["replica"][rows].tolist(), marks["rank"][rows].tolist()),
        impact_ppm=run.share_ppm(num_preempted, max(len(run.index.requests), 1)),
        figures={"num_lost": len(rows), "num_preempted": num_preempted, "num_failed": num_failed},
        s=int(marks["s"][rows[0]]),
        ts=int(marks["ts"][rows[0]]),
    )


def find_dead_engines(run: RunColumns) -> Iterator[Finding]:
    """The engine died, and another one went on with the run."""
    marks = run.index.marks
    rows = np.flatnonzero(marks["kind"] == MarkKind.RECOVERED)
    if not len(rows):
        return
    down_ns = int(marks["down_ns"][rows].sum())
    reasons = Counter(run.index.name(text) or "unknown" for text in marks["text"][rows].tolist())
    yield Finding(
        kind="engine_down",
        title=f"The engine was down {counted(len(rows), 'time')}",
        text=f"In all for {seconds(down_ns)}. Most often: {reasons.most_common(1)[0][0]}. Each time all workers and "
        "their caches were lost.",
        culprit="the engine",
        impact_ppm=run.share_ppm(down_ns, run.total_ns),
        figures={"num_recoveries": len(rows), "down_ns": down_ns},
        s=int(marks["s"][rows[0]]),
        ts=int(marks["ts"][rows[0]]),
    )


def _who(replicas: list[int], ranks: list[int]) -> str:
    """Whose workers were lost: "workers of replicas 0, 1", or of several ranks "rank 3 of replica 0"."""
    pairs = sorted(set(zip(replicas, ranks, strict=True)))
    if any(rank >= 0 for _, rank in pairs):
        names = [(f"rank {rank}" if rank >= 0 else "a rank", replica) for replica, rank in pairs]
        return ", ".join(f"{rank} of replica {replica}" for rank, replica in names)
    numbers = [str(replica) for replica, _ in pairs]
    of = "replica" if len(numbers) == 1 else "replicas"
    return f"{'worker' if len(replicas) == 1 else 'workers'} of {of} {', '.join(numbers)}"


def find_failing_plugins(run: RunColumns) -> Iterator[Finding]:
    """A plug-in raised or answered nonsense, and the engine went on without it."""
    marks = run.index.marks
    rows = np.flatnonzero(marks["kind"] == MarkKind.PLUGIN_FAILED)
    if not len(rows):
        return
    errors = Counter(run.index.name(text) for text in marks["text"][rows].tolist())
    error, _ = errors.most_common(1)[0]
    yield Finding(
        kind="plugin_failing",
        title=f"A plug-in failed {counted(len(rows), 'time')}",
        text=f"The engine went on without its answers. Most often: {error}",
        culprit=error,
        impact_ppm=run.share_ppm(len(rows), max(len(run.index.drains), 1)),
        figures={"num_failures": len(rows)},
        s=int(marks["s"][rows[0]]),
        ts=int(marks["ts"][rows[0]]),
    )
