"""Tables of the core's state: the line, the residents, blocks, prefix trees, steps in flight and timers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from eventlm.core.state.block_pool import ROOT
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.wait_reason import find_present_wait_reason, urgency_now
from eventlm.errors import UsageError
from eventlm.events import Header, PluginRecord
from eventlm.formatting import counted
from eventlm.replay.debugger.results import TableResult, sequence_name
from eventlm.replay.explain.words import CAUSES
from eventlm.replay.expressions.evaluation import Value
from eventlm.types import ceil_div

#: Roots of a prefix tree that get rows.
_MAX_ROOTS = 20
_WAITS = (State.WAITING, State.WAITING_FOR_GRAMMAR)


def name_of(sequence: Sequence) -> str:
    """As commands take it."""
    return sequence_name(sequence.id, sequence.arrival.n)


def queue(state: CoreState, where: str) -> TableResult:
    """Those that wait, in the order of the line; last those that are not in it."""
    in_line = sorted(
        (
            (urgency_now(state, each), each)
            for replicaset in state.replicasets
            for line in replicaset.queues
            for each in line.members
        ),
        key=lambda pair: pair[0],
    )
    members = {each.id for _, each in in_line}
    others = [each for each in _live(state) if each.state in _WAITS and each.id not in members]
    rows: list[list[Value]] = []
    for place, (urgency, each) in enumerate(in_line, 1):
        rows.append([place, *_waiting(state, each), urgency[0], urgency[1], each.skips, ""])
    for each in others:
        rows.append(
            [None, *_waiting(state, each), each.urgency[0], each.urgency[1], each.skips, _out_of_line(state, each)]
        )
    columns = [
        "place",
        "request",
        "replica",
        "tokens",
        "waited_ns",
        "blocks",
        "priority",
        "key",
        "skips",
        "not in line",
    ]
    if not others:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    title = f"{counted(len(rows), 'sequence')} waiting {where}, by {state.policy_name}: lower keys go first"
    return TableResult(title=title, columns=columns, rows=rows)


def _out_of_line(state: CoreState, each: Sequence) -> str:
    """Why a sequence that waits is not in the line."""
    reason = find_present_wait_reason(state, each)
    assert reason is not None
    # What keeps it there even so.
    is_certain = reason.cause in ("grammar", "draining")
    return "not planned yet" if state.drain_open and not is_certain else CAUSES[reason.cause]


def _waiting(state: CoreState, each: Sequence) -> list[Value]:
    home = "any" if each.home < 0 else str(each.home)
    blocks = each.blocks_to_admit(state.set_of(each).config.block_size)
    return [name_of(each), home, each.num_tokens, state.now_ns - each.arrival.ts, blocks]


def running(state: CoreState, where: str) -> TableResult:
    """The residents of all replicas, most urgent first."""
    rows: list[list[Value]] = [
        [
            replica.index,
            name_of(each),
            each.state.name.lower(),
            each.num_tokens,
            each.num_output_tokens,
            each.launched_tokens,
            len(each.block_table),
            each.in_flight,
            each.residency - 1,
            each.urgency[1],
        ]
        for replica in state.replicas
        for each in replica.running
    ]
    return TableResult(
        title=f"{counted(len(rows), 'resident')} {where}, most urgent at admission first",
        columns=[
            "replica",
            "request",
            "state",
            "tokens",
            "output",
            "launched",
            "blocks",
            "in flight",
            "readmissions",
            "key",
        ],
        rows=rows,
    )


def pool(state: CoreState, where: str) -> TableResult:
    """The blocks of all replicas."""
    sizes = " or ".join(dict.fromkeys(str(each.config.block_size) for each in state.replicas))
    rows: list[list[Value]] = []
    for replica in state.replicas:
        blocks = replica.pool
        held = blocks.num_blocks - blocks.num_available
        shared = sum(count > 1 for count in blocks.references)
        free = blocks.num_available - blocks.num_idle
        rows.append([replica.index, blocks.num_blocks, free, blocks.num_idle, held, shared, len(blocks.tree)])
    return TableResult(
        title=f"blocks of {sizes} tokens {where}",
        columns=["replica", "blocks", "free", "cached", "held", "shared", "hittable"],
        rows=rows,
        notes=["cached: held by none, can be hit and taken back; shared: of the held, in several tables"],
    )


def tree(state: CoreState, where: str) -> TableResult:
    """The largest prefix trees: what begins with the same block."""
    rows: list[list[Value]] = []
    num_roots = 0
    for replica in state.replicas:
        found = _roots(replica)
        num_roots += len(found)
        rows += [[replica.index, *row] for row in found]
    # Largest first.
    rows.sort(key=lambda row: (-(row[2] or 0), row[0], row[1]))  # type: ignore[operator]
    left = [f"and {counted(num_roots - _MAX_ROOTS, 'smaller one')}"] if num_roots > _MAX_ROOTS else []
    return TableResult(
        title=f"{counted(num_roots, 'prefix tree')} {where}, by the name of its first block",
        columns=["replica", "first block", "blocks", "deepest", "held", "leaves"],
        rows=rows[:_MAX_ROOTS],
        notes=left,
    )


def _roots(replica: Replica) -> list[list[Value]]:
    nodes, references = replica.pool.tree, replica.pool.references
    children: dict[int, list[int]] = {}
    for name, (_, parent) in nodes.items():
        children.setdefault(parent, []).append(name)
    rows: list[list[Value]] = []
    for root in children.get(ROOT, []):
        blocks = deepest = held = leaves = 0
        left = [(root, 1)]
        while left:
            name, depth = left.pop()
            below = children.get(name, [])
            blocks, deepest = blocks + 1, max(deepest, depth)
            held += references[nodes[name][0]] > 0
            leaves += not below
            left += [(each, depth + 1) for each in below]
        rows.append([root, blocks, deepest, held, leaves])
    return rows


def steps(state: CoreState, where: str) -> TableResult:
    """The steps in flight."""
    rows: list[list[Value]] = [
        [
            replica.index,
            step.step,
            step.launch_seq,
            len(step.decodes),
            len(step.chunks),
            sum(chunk.end - chunk.start for chunk in step.chunks),
            step.predicted_ns,
            ", ".join(f"{name_of(chunk.sequence)} {chunk.start}-{chunk.end}" for chunk in step.chunks[:4])
            + (" ..." if len(step.chunks) > 4 else ""),
        ]
        for replica in state.replicas
        for step in replica.in_flight
    ]
    return TableResult(
        title=f"{counted(len(rows), 'step')} in flight {where}",
        columns=["replica", "step", "launched by", "decodes", "chunks", "chunk tokens", "predicted_ns", "prompts"],
        rows=rows,
    )


def timers(state: CoreState, where: str) -> TableResult:
    """The timers of live requests, earliest first."""
    rows: list[list[Value]] = [
        [request, due_ns, due_ns - state.now_ns]
        for due_ns, request in sorted(state.timers)
        if request in state.requests
    ]
    title = f"{counted(len(rows), 'timer')} {where}"
    return TableResult(title=title, columns=["request", "due_ns", "from now_ns"], rows=rows)


def replica(state: CoreState, index: int, where: str) -> TableResult:
    """One replica. Raises UsageError if there is none of this number."""
    if not 0 <= index < len(state.replicas):
        raise UsageError(f"there is no replica {index}; the run has {counted(len(state.replicas), 'replica')}, from 0")
    each = state.replicas[index]
    blocks, limits = each.pool, each.config
    rows: list[list[Value]] = [
        ["worker", f"up, epoch {each.epoch}" if each.up else "none is up"],
        ["next step", each.next_step],
        ["steps in flight", f"{len(each.in_flight)} of at most {limits.steps_in_flight}"],
        [
            "running",
            f"{len(each.running):,} of at most {limits.max_residents:,}, {each.num_partial:,} half-done prompts",
        ],
        ["waiting", f"{len(each.queue):,} for it, {len(state.set_of(each).shared_queue):,} for any replica"],
        [
            "blocks",
            f"{blocks.num_blocks:,}, {blocks.num_available - blocks.num_idle:,} free, {blocks.num_idle:,} cached",
        ],
        ["admitted tokens", each.admitted_tokens],
        ["to be forgotten by its worker", len(each.forget)],
    ]
    return TableResult(title=f"replica {index} {where}", columns=["", "value"], rows=rows)


def sequence(state: CoreState, found: Sequence, where: str) -> TableResult:
    """One live sequence."""
    scheduling, limits = found.arrival.scheduling, state.set_of(found).config
    rows: list[list[Value]] = [
        ["state", found.state.name.lower().replace("_", " ")],
        ["arrived", f"{(state.now_ns - found.arrival.ts) / 1e6:,.3f} ms ago, event {found.request}"],
        ["prompt tokens", found.prompt_tokens],
        ["output tokens", f"{found.num_output_tokens:,} of at most {found.max_total_tokens - found.prompt_tokens:,}"],
        ["prefill", f"{found.launched_tokens:,} of {found.prefill_tokens:,} tokens launched"],
        ["cached tokens", found.cached_tokens],
        [
            "blocks",
            f"{len(found.block_table):,} of {ceil_div(found.num_tokens, limits.block_size):,} needed so far",
        ],
        ["replica", "none" if found.replica < 0 else str(found.replica)],
        ["rows in flight", found.in_flight],
        ["admissions", found.residency],
        ["evictions since its last token", found.evictions],
        ["skips", f"{found.skips} of at most {limits.max_skips}"],
        ["priority and key", f"{found.urgency[0]}, {found.urgency[1]:,}"],
        ["kind and class", f"{scheduling.kind}, {scheduling.service_class or 'no class'}"],
    ]
    return TableResult(title=f"request {name_of(found)} {where}", columns=["", "value"], rows=rows)


def config(header: Header) -> TableResult:
    """What the run was started with; of several replicasets each, by name."""
    rows: list[list[Value]] = []
    is_alone = len(header.sets) == 1
    for each in header.sets:
        options = [*msgspec.to_builtins(each.core).items(), *map(_plugin, each.plugins)]
        rows += [[*([] if is_alone else [each.name]), name, _shown(value)] for name, value in options]
    columns = [*([] if is_alone else ["replicaset"]), "option", "value"]
    return TableResult(title=f"run {header.run}", columns=columns, rows=rows)


def _plugin(record: PluginRecord) -> tuple[str, str]:
    parameters = msgspec.json.encode(record.parameters).decode() if record.parameters else ""
    return record.kind, f"{record.name} {parameters}".strip()


def _shown(value: Any) -> Value:
    return value if isinstance(value, int | str | bool) else msgspec.json.encode(value).decode()


def _live(state: CoreState) -> Iterator[Sequence]:
    for request in state.requests.values():
        for each in request.sequences:
            if each.state is not State.FINISHED:
                yield each


def summary(state: CoreState) -> dict[str, Value]:
    """The state as a flat list of values, for comparing two."""
    found: dict[str, Value] = {
        "policy": state.policy_name,
        "paused": state.paused,
        "timers": len(state.timers) - state.num_dead_timers,
    }
    for each in state.replicas:
        where = f"replica {each.index}"
        blocks = each.pool
        found |= {
            f"{where} worker": f"epoch {each.epoch}" if each.up else "none",
            f"{where} waiting": len(each.queue) + len(state.set_of(each).shared_queue),
            f"{where} running": len(each.running),
            f"{where} half-done prompts": each.num_partial,
            f"{where} free blocks": blocks.num_available - blocks.num_idle,
            f"{where} cached blocks": blocks.num_idle,
            f"{where} held blocks": blocks.num_blocks - blocks.num_available,
            f"{where} next step": each.next_step,
            f"{where} steps in flight": ", ".join(str(step.step) for step in each.in_flight) or "none",
        }
    for member in _live(state):
        where = f"request {name_of(member)}"
        found |= {
            where: member.state.name.lower().replace("_", " "),
            f"{where} tokens": member.num_tokens,
            f"{where} launched": member.launched_tokens,
            f"{where} blocks": len(member.block_table),
            f"{where} skips": member.skips,
            f"{where} admissions": member.residency,
        }
    return found


def difference(first: dict[str, Value], second: dict[str, Value], title: str) -> TableResult:
    """What differs between two summaries. Of requests that came or ended only that is said."""
    came = {name for name in second if name.startswith("request ") and name not in first}
    gone = {name for name in first if name.startswith("request ") and name not in second}
    rows: list[list[Value]] = []
    for name in [*first, *(name for name in second if name not in first)]:
        if name in came | gone and name.count(" ") > 1:
            continue
        old, new = first.get(name), second.get(name)
        if old != new:
            rows.append([name, _text(old, "not there"), _text(new, "ended")])
    return TableResult(
        title=title if rows else f"{title}: nothing differs",
        columns=["", "before", "after"],
        rows=rows,
    )


def _text(value: Value, absent: str) -> str:
    if value is None:
        return absent
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
