"""The engine of a branch: the core of the recorded run at that point, with other plug-ins or limits."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from eventlm.core.core import Core
from eventlm.core.state.validate import validate
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import InvariantError, UsageError
from eventlm.events import Fact, Header, PolicySwapped
from eventlm.replay.branch.point import BranchPoint
from eventlm.replay.cost.model import CostModel
from eventlm.replay.rebuild import FIXED_BY_SNAPSHOT, Changes, rebuild
from eventlm.replay.what_if.engine import (
    Alternative,
    AlternativeEngine,
    changed_plugin_records,
    check_limits,
    simulated_header,
)
from eventlm.replay.workload.recorded_run import RecordedRun

#: Limits of what a snapshot holds.
FIXED = (*FIXED_BY_SNAPSHOT, "state_slots", "state_interval")


class BranchEngine(NamedTuple):
    """The engine of a branch, and the policy that takes over at the point; "" for none."""

    engine: AlternativeEngine
    policy: str

    def new_core(self, point: BranchPoint) -> Core:
        """The core at the point."""
        return self.engine.rebuilt.restored_core(point.snapshot)


def build_branch_engine(header: Header, point: BranchPoint, changes: Changes) -> BranchEngine:
    """The engine of a run's header with the changes.

    Raises UsageError for a change that is invalid, or that the state at the point contradicts.
    """
    fixed = [name for name in changes.settings if name in FIXED]
    if fixed:
        raise UsageError(
            f"--set {fixed[0]}: the cache at event {point.s:,} has the recorded size, which cannot change "
            "in the middle of a run; `eventlm replay` runs the whole work with another"
        )
    # The policy takes over by a fact after the snapshot, whose keys are of the one before it.
    rebuilt = rebuild(structs.replace(header, s=0), structs.replace(changes, policy=None))
    check_limits(rebuilt.config, changes)
    records = changed_plugin_records(header, structs.replace(changes, policy=None))
    policy = ""
    if changes.policy is not None:
        chosen = resolve("policy", changes.policy)
        policy = chosen.record.name
        policies = rebuilt.plugins.policies | {policy: chosen.instance}
        rebuilt = rebuilt._replace(plugins=structs.replace(rebuilt.plugins, policies=policies))
        records = [record for record in records if (record.kind, record.name) != ("policy", policy)] + [chosen.record]
    found = BranchEngine(AlternativeEngine(Alternative(changes=changes), rebuilt, records, rebuilt.drift), policy)
    try:
        core = found.new_core(point)
    except InvariantError as error:
        raise UsageError(f"the run cannot be continued from event {point.s:,}: {error}") from error
    try:
        validate(core.state)
    except InvariantError as error:
        raise UsageError(f"{changes.describe()} contradicts the state {error}; branch elsewhere") from error
    return found


def branch_header(run: RecordedRun, point: BranchPoint, found: BranchEngine, cost: CostModel) -> Header:
    """The header of a branch: what it is of, after which line of which run, and which policy decides there."""
    name = found.engine.alternative.describe() or "unchanged"
    header = simulated_header(run, found.engine, name, cost)
    slug = header.run.removeprefix(f"{run.header.run}-what-if-")
    return structs.replace(
        header,
        run=f"{run.header.run}-branch-{point.s}-{slug}",
        previous_h=point.h,
        host={"simulated": header.host["simulated"] | {"event": point.s, "policy": found.policy or point.state.policy}},
    )


def facts_after(run: RecordedRun, point: BranchPoint, policy: str) -> list[Fact]:
    """The facts of no request after the point. Another policy takes over at once, and later swaps do not happen."""
    found: list[Fact] = [PolicySwapped(ts=point.now_ns, name=policy)] if policy else []
    for fact in run.external_facts:
        if fact.s > point.s and not (policy and isinstance(fact, PolicySwapped)):
            # Its cause has another position here.
            found.append(structs.replace(fact, c=0))
    return found


def left_out_swaps(run: RecordedRun, point: BranchPoint, policy: str) -> str:
    """A note if the run's policy was swapped after the point, where the branch has its own; else empty."""
    later = [fact.name for fact in run.external_facts if isinstance(fact, PolicySwapped) and fact.s > point.s]
    if not policy or not later:
        return ""
    return f"the run's policy was swapped later on ({', '.join(later)}); the branch keeps {policy}"
