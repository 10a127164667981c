"""What the stages and KV groups of replicas that are split into ranks did: lanes for the timeline, and their sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from eventlm.core.recorded_layouts import recorded_layouts
from eventlm.page.timeline import PHASES
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import Column

#: Lanes of as many whole replicas as there is room for.
_MAX_LANES = 24
_PPM = 1_000_000
_PREFILL, _DECODE = PHASES.index("prefill"), PHASES.index("decode")


class StageTimes:
    """Each stage's part of each completed step, by replica, stage and step; columns of one length.

    came_ns: when the stage before had it done. wait_ns: for how long it waited then for a stage that had another one;
    exchange_ns: what it took besides to get there.
    """

    def __init__(self, index: Index) -> None:
        stages = index.stages
        replica, step, stage = stages["replica"], stages["step"], stages["stage"]
        start_ns, end_ns = stages["start_ns"], stages["end_ns"]
        # A step's stages are in a row.
        came_ns = np.where(stage > 0, np.concatenate([start_ns[:1], end_ns[:-1]]), start_ns)
        order = np.lexsort((step, stage, replica))
        self.replica, self.stage, self.step = replica[order], stage[order], step[order]
        self.start_ns, self.end_ns, self.came_ns = start_ns[order], end_ns[order], came_ns[order]
        is_next = np.zeros(len(order), np.bool_)
        is_next[1:] = (np.diff(self.replica) == 0) & (np.diff(self.stage) == 0)
        free_ns = np.where(is_next, np.concatenate([self.start_ns[:1], self.end_ns[:-1]]), self.came_ns)
        self.wait_ns = np.where(self.stage > 0, np.maximum(np.minimum(self.start_ns, free_ns) - self.came_ns, 0), 0)
        self.exchange_ns = np.maximum(self.start_ns - self.came_ns, 0) - self.wait_ns


def stage_rows(index: Index, times: StageTimes, base_ns: int) -> list[dict[str, Any]]:
    """Each stage of each replica: how long it was busy; on average, what a step waits for it and takes to reach it."""
    span_ns = max(index.facts.last_ns - base_ns, 1)
    found = []
    for replica, layout in enumerate(recorded_layouts(index.header)):
        for stage in range(layout.stages) if layout.stages > 1 else ():
            own = (times.replica == replica) & (times.stage == stage)
            num_steps = max(int(own.sum()), 1)
            busy_ns = int((times.end_ns - times.start_ns)[own].sum())
            found.append(
                {
                    "replica": replica,
                    "stage": stage,
                    "busyNs": busy_ns,
                    "busyPpm": min(busy_ns * _PPM // span_ns, _PPM),
                    "stepNs": busy_ns // num_steps,
                    "waitNs": int(times.wait_ns[own].sum()) // num_steps,
                    "exchangeNs": int(times.exchange_ns[own].sum()) // num_steps,
                }
            )
    return found


def group_rows(index: Index) -> list[dict[str, Any]]:
    """Each KV group of each replica: its steps that completed, and the tokens that it computed in them."""
    loads = index.loads
    found = []
    for replica, layout in enumerate(recorded_layouts(index.header)):
        own = _completed_loads(index, replica)
        total = max(int(loads["tokens"][own].sum()), 1)
        for group in range(layout.groups) if layout.groups > 1 else ():
            tokens = loads["tokens"][own][loads["group"][own] == group]
            num_tokens = int(tokens.sum())
            found.append(
                {
                    "replica": replica,
                    "group": group,
                    "steps": int((tokens > 0).sum()),
                    "tokens": num_tokens,
                    "sharePpm": num_tokens * _PPM // total,
                }
            )
    return found


def _completed_loads(index: Index, replica: int) -> Column:
    """The rows of what the KV groups of a replica did in steps that were not lost."""
    loads, steps = index.loads, index.steps
    done = steps["step"][(steps["replica"] == replica) & (steps["done_s"] >= 0)]
    return np.flatnonzero((loads["replica"] == replica) & np.isin(loads["step"], done))


def _steps(index: Index, replica: int, numbers: Column) -> dict[str, Column]:
    """What lanes show of steps of a replica, by their numbers."""
    steps = index.steps
    own = np.flatnonzero(steps["replica"] == replica)
    rows = own[np.searchsorted(steps["step"][own], numbers)]
    phase = np.where(steps["chunks"][rows] > 0, _PREFILL, _DECODE)
    return {"step": numbers, "phase": phase, "start": steps["start_ns"][rows], "end": steps["end_ns"][rows]}


def _stage_lane(index: Index, times: StageTimes, replica: int, stage: int) -> dict[str, Column]:
    own = (times.replica == replica) & (times.stage == stage)
    found = {"start": times.start_ns[own], "end": times.end_ns[own], "came": times.came_ns[own]}
    numbers = times.step[own]
    return _steps(index, replica, numbers) | found | {"tokens": np.zeros_like(numbers), "most": np.zeros_like(numbers)}


def _group_lane(index: Index, times: StageTimes, replica: int, group: int) -> dict[str, Column]:
    """Of the completed steps in which the group has a part. In a pipeline they are shown in its first stage."""
    loads = index.loads
    own = _completed_loads(index, replica)
    num_groups = int(loads["group"][own].max(initial=0)) + 1
    # A step's groups are in a row.
    by_step = loads["tokens"][own].reshape(-1, num_groups)
    numbers, tokens = loads["step"][own][::num_groups], by_step[:, group]
    found = _steps(index, replica, numbers)
    in_first = np.flatnonzero((times.replica == replica) & (times.stage == 0))
    if len(in_first):
        rows = in_first[np.searchsorted(times.step[in_first], numbers)]
        found |= {"start": times.start_ns[rows], "end": times.end_ns[rows]}
    found |= {"tokens": tokens, "most": by_step.max(axis=1), "came": found["start"]}
    return {name: column[tokens > 0] for name, column in found.items()}


def lanes(index: Index, times: StageTimes, base_ns: int, end_ns: int) -> tuple[list[str], dict[str, Column]]:
    """The names of the lanes of stages and KV groups, and the lanes as `pack_timeline` takes them; of no replica that
    has several of them, nothing.
    """
    names: list[str] = []
    parts: list[dict[str, Column]] = []
    layouts = recorded_layouts(index.header)
    for replica, layout in enumerate(layouts):
        num_stages = layout.stages if layout.stages > 1 else 0
        num_groups = layout.groups if layout.groups > 1 else 0
        if len(names) + num_stages + num_groups > _MAX_LANES:
            break
        prefix = f"{replica}: " if len(layouts) > 1 else ""
        for stage in range(num_stages):
            parts.append(_ordered(_stage_lane(index, times, replica, stage), len(names)))
            names.append(f"{prefix}stage {stage}")
        for group in range(num_groups):
            parts.append(_ordered(_group_lane(index, times, replica, group), len(names)))
            names.append(f"{prefix}group {group}")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    for name in ("start", "end", "came") if parts else ():
        columns[name] = np.clip(columns[name] - base_ns, 0, end_ns)
    return names, columns


def _ordered(lane: dict[str, Column], number: int) -> dict[str, Column]:
    """With its number, by start: what is known of another host's clock changes a little."""
    order = np.argsort(lane["start"], kind="stable")
    return {"lane": np.full(len(order), number, np.int64), **{name: column[order] for name, column in lane.items()}}
