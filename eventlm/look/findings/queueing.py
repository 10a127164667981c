"""Findings about those that wait: saturation, starvation, the head of the line, rejections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from eventlm.formatting import counted
from eventlm.look.findings.finding import CAUSE_NUMBERS, Finding, RunColumns
from eventlm.look.words import percent, seconds
from eventlm.replay.index.gauges import WAIT_CAUSES
from eventlm.replay.index.tables import Column
from eventlm.types import NANOSECONDS_PER_SECOND

#: Requests wait for this share of the run, and waiting takes this share of all requests' time.
_SATURATED_TIME_PPM = 200_000
_SATURATED_WAIT_PPM = 250_000
#: Waits from which on waiting matters at all.
_MATTERS_NS = NANOSECONDS_PER_SECOND // 2
#: A starved sequence was overtaken by so many later arrivals, and waited so many times as long as the median of those
#: that waited.
_OVERTAKEN = 48
_TIMES_MEDIAN = 6
_MIN_STARVED = 3
#: The head of the line lacks blocks for this share of the run while most slots, and this share of blocks, are free.
_HEAD_TIME_PPM = 80_000
_FREE_BLOCKS_PPM = 150_000
_REJECTED_PPM = 10_000
#: What to raise or lower for each limit that sequences wait for.
_LIMITS = {
    "sequence_limit": "max_num_seqs",
    "blocks": "num_blocks",
    "head_of_line": "num_blocks",
    "token_budget": "max_num_batched_tokens",
}
_MAX_NAMED = 20


def find_saturation(run: RunColumns) -> Iterator[Finding]:
    """More work arrives than is done."""
    waiting = run.index.drains["waiting"] > 0
    time_ppm = run.share_ppm(run.time(waiting), run.total_ns)
    waited = run.waited_ns[run.has_wait]
    wait_ppm = run.share_ppm(int(waited.sum()), int(run.e2e_ns[run.has_wait].sum()))
    if not len(waited) or time_ppm < _SATURATED_TIME_PPM or wait_ppm < _SATURATED_WAIT_PPM:
        return
    p90 = int(np.quantile(waited, 0.9))
    if p90 < _MATTERS_NS:
        return
    limit, limit_ppm = _limit_of_heads(run)
    most = int(run.index.drains["waiting"].max())
    at = int(run.index.drains["waiting"].argmax())
    name = _LIMITS.get(limit, "")
    why = "What the head of the line waits for is known of verified runs only."
    value = f" ({name} {getattr(run.config, name):,})" if name else ""
    if limit:
        why = f"The head of the line mostly waits for {_words(limit)}{value}: {percent(limit_ppm)} of that time."
    yield Finding(
        kind="saturation",
        title=f"More work arrives than this engine can do: requests wait for {percent(time_ppm)} of the run",
        text=f"Requests are waiting {percent(time_ppm)} of the time, and waiting takes {percent(wait_ppm)} of all "
        f"requests' time. The p90 wait is {seconds(p90)}, the longest queue {counted(most, 'sequence')}. {why}",
        culprit=f"{name} {getattr(run.config, name):,}" if name else "load",
        impact_ppm=wait_ppm,
        figures={
            "waiting_time_share_ppm": time_ppm,
            "wait_share_ppm": wait_ppm,
            "p90_wait_ns": p90,
            "most_waiting": most,
        },
        requests=run.identities(_largest(run.waited_ns, run.has_wait)),
        s=int(run.index.drains["s"][at]),
        ts=int(run.index.drains["ts"][at]),
    )


def _limit_of_heads(run: RunColumns) -> tuple[str, int]:
    """What the heads of the line waited for longest, and the share of their time, ppm; "" if that is not known."""
    sums: Counter[str] = Counter()
    for replica in run.replicas:
        causes = run.gauge("head_cause", replica)
        for number, cause in enumerate(WAIT_CAUSES):
            sums[cause] += run.time(causes == number)
    sums["blocks"] += sums.pop("head_of_line", 0)
    # While the pipeline is full, nothing can be admitted, whatever limits the steps.
    sums.pop("steps_in_flight", None)
    if not sums.total():
        return "", 0
    ((limit, longest),) = sums.most_common(1)
    return limit, run.share_ppm(longest, sums.total())


def _words(cause: str) -> str:
    return {
        "sequence_limit": "a slot",
        "blocks": "KV blocks",
        "token_budget": "room in a step",
        "batcher": "the batcher",
        "worker": "a worker",
        "backend_limit": "a backend with room",
        "avoided": "another backend",
        "backend": "a backend",
    }.get(cause, cause.replace("_", " "))


def find_starvation(run: RunColumns) -> Iterator[Finding]:
    """Some are overtaken again and again by others that arrived later."""
    rows = np.flatnonzero(run.has_wait)
    if not len(rows):
        return
    requests = run.index.requests
    overtaken = _overtaken(requests["arrived_ns"][rows], run.waited_ns[rows], requests["priority"][rows])
    waited = run.waited_ns[rows]
    usual = int(np.median(waited[waited > 0])) if (waited > 0).any() else 0
    is_starved = (overtaken >= _OVERTAKEN) & (waited >= _TIMES_MEDIAN * usual) & (waited >= _MATTERS_NS)
    num_starved = int(is_starved.sum())
    if num_starved < _MIN_STARVED:
        return
    starved = rows[is_starved][np.argsort(-waited[is_starved], kind="stable")]
    worst = int(starved[0])
    s, ts = run.while_waiting(worst)
    impact = run.share_ppm(int(waited[is_starved].sum()), int(run.e2e_ns[rows].sum()))
    yield Finding(
        kind="starvation",
        title=f"{counted(num_starved, 'sequence')} starved: later arrivals went first again and again",
        text=f"Their median wait is {seconds(int(np.median(waited[is_starved])))}, against "
        f"{seconds(usual)} for all that waited. Each was overtaken by "
        f"{int(overtaken[is_starved].min()):,} or more that arrived later. "
        f"{_what_they_share(run, starved, rows)}",
        culprit=run.plugin("policy"),
        impact_ppm=impact,
        figures={
            "num_starved": num_starved,
            "most_overtaken": int(overtaken[is_starved].max()),
            "median_wait_ns": int(np.median(waited[is_starved])),
            "usual_wait_ns": usual,
        },
        requests=run.identities(starved[:_MAX_NAMED]),
        s=s,
        ts=ts,
        command=f"why {int(requests['request'][worst])}",
    )


def _overtaken(arrived_ns: Column, waited_ns: Column, priority: Column) -> Column:
    """By how many later arrivals, of no higher priority, each was overtaken. Rows are in order of arrival."""
    admitted_ns = arrived_ns + waited_ns
    found = np.zeros(len(arrived_ns), np.int64)
    for level in np.unique(priority).tolist():
        rows = np.flatnonzero(priority == level)
        found[rows] = _inversions(admitted_ns[rows])
    return found


def _inversions(values: Column) -> Column:
    """For each value, how many smaller ones follow it: a Fenwick tree over their ranks."""
    ranks = np.unique(values, return_inverse=True)[1].tolist()
    tree = [0] * (len(ranks) + 2)
    found = np.zeros(len(ranks), np.int64)
    for place in range(len(ranks) - 1, -1, -1):
        rank, count = ranks[place], 0
        while rank > 0:
            count += tree[rank]
            rank &= rank - 1
        found[place] = count
        rank = ranks[place] + 1
        while rank < len(tree):
            tree[rank] += 1
            rank += rank & -rank
    return found


def _what_they_share(run: RunColumns, starved: Column, rows: Column) -> str:
    requests = run.index.requests
    others = np.setdiff1d(rows, starved)
    classes = np.unique(requests["service_class"][starved])
    if len(classes) == 1 and len(others) and (requests["service_class"][others] != classes[0]).mean() > 0.9:
        return f"All are of service class {run.index.name(int(classes[0])) or 'default'}."
    if len(others):
        own = int(np.median(requests["prompt_tokens"][starved]))
        usual = int(np.median(requests["prompt_tokens"][others]))
        length = "long" if own > 2 * usual else "short" if 2 * own < usual else ""
        if length:
            return f"Their prompts are {length}: a median of {own:,} tokens, of others {usual:,}."
    return "They differ from others neither by class nor by the length of their prompts."


def find_head_of_line(run: RunColumns) -> Iterator[Finding]:
    """One that does not fit keeps all others waiting, though there is room for them."""
    blocked = (CAUSE_NUMBERS["blocks"], CAUSE_NUMBERS["head_of_line"])
    total = 0
    by_head: Counter[tuple[int, int]] = Counter()
    for replica in run.replicas:
        selected = _is_blocked(run, replica, blocked)
        total += run.time(selected)
        heads = zip(
            run.gauge("head_request", replica)[selected].tolist(),
            run.gauge("head_index", replica)[selected].tolist(),
            run.drain_ns[selected].tolist(),
            strict=True,
        )
        for request, index, duration_ns in heads:
            by_head[request, index] += duration_ns
    share = run.share_ppm(total, run.total_ns * len(run.replicas))
    if share < _HEAD_TIME_PPM or total < _MATTERS_NS:
        return
    worst = [head for head, _ in by_head.most_common(_MAX_NAMED)]
    row = run.index.find_row(*worst[0])
    tokens = int(run.index.requests["prompt_tokens"][row]) if row is not None else 0
    s, ts = run.while_waiting(row) if row is not None else (run.planned_s(worst[0][0]), -1)
    yield Finding(
        kind="head_of_line",
        title="One that does not fit keeps the others waiting",
        text=f"For {percent(share)} of the run ({seconds(total)}) the head of the line lacked KV blocks while others "
        f"waited after it, most slots and part of the blocks were free. Longest at the head: request {worst[0][0]} "
        f"with a prompt of {tokens:,} tokens. max_skips {run.config.max_skips} says how often it may be passed over.",
        culprit=f"request {worst[0][0]}, max_skips {run.config.max_skips}",
        impact_ppm=share,
        figures={"blocked_ns": total, "blocked_share_ppm": share, "num_heads": len(by_head)},
        requests=worst,
        s=s,
        ts=ts,
        command=f"why {worst[0][0]}",
    )


def _is_blocked(run: RunColumns, replica: int, blocked: tuple[int, int]) -> NDArray[np.bool_]:
    spare = run.gauge("free", replica) + run.gauge("cached", replica)
    is_blocked = np.isin(run.gauge("head_cause", replica), blocked) & (run.gauge("waiting", replica) > 1)
    has_slots = run.gauge("running", replica) * 2 <= run.config.max_residents
    return is_blocked & has_slots & (spare * 1_000_000 >= run.config.blocks_per_replica * _FREE_BLOCKS_PPM)


def find_rejections(run: RunColumns) -> Iterator[Finding]:
    """Requests are turned away."""
    rows = np.flatnonzero(run.is_rejected)
    share = run.share_ppm(len(rows), len(run.index.requests))
    if share < _REJECTED_PPM:
        return
    reasons = Counter(run.index.name(reason) for reason in run.index.requests["reason"][rows].tolist())
    reason = reasons.most_common(1)[0][0].removeprefix("rejected: ")
    name = "max_queue_len" if reason == "queue_full" else "max_model_len"
    yield Finding(
        kind="rejections",
        title=f"{counted(len(rows), 'request')} rejected, mostly for {reason.replace('_', ' ')}",
        text=f"{percent(share)} of all requests; {name} is {getattr(run.config, name):,}.",
        culprit=f"{name} {getattr(run.config, name):,}",
        impact_ppm=share,
        figures={"num_rejected": len(rows)},
        requests=run.identities(rows[:_MAX_NAMED]),
        s=int(run.index.requests["request"][rows[0]]),
        ts=int(run.index.requests["arrived_ns"][rows[0]]),
    )


def _largest(values: Column, selected: NDArray[np.bool_]) -> Column:
    rows = np.flatnonzero(selected)
    return rows[np.argsort(-values[rows], kind="stable")][:_MAX_NAMED]
