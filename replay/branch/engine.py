"""The engine of a branch: the core of the recorded run at that point, with other plug-ins or limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from eventlm.core.core import Core
from eventlm.core.state.replicaset import SetParts
from eventlm.core.state.validate import validate
from eventlm.engine.plugins.registry import ResolvedPlugin, resolve
from eventlm.errors import InvariantError, UsageError
from eventlm.events import Fact, Header, PluginRecord, PolicySwapped, ReplicasetRecord
from eventlm.replay.branch.point import BranchPoint
from eventlm.replay.cost.backend_model import AnyCost
from eventlm.replay.rebuild import FIXED_BY_SNAPSHOT, Changes, SetChanges, errors_of_set, rebuild
from eventlm.replay.what_if.engine import (
    Alternative,
    AlternativeEngine,
    changed_sets,
    left_swaps,
    simulated_header,
)
from eventlm.replay.workload.recorded_run import RecordedRun

#: Limits of what a snapshot holds.
FIXED = (*FIXED_BY_SNAPSHOT, "state_slots", "state_interval")


class BranchEngine(NamedTuple):
    """The engine of a branch, and by replicaset the policy that takes over at the point; "" for none."""

    engine: AlternativeEngine
    policies: list[str]

    def new_core(self, point: BranchPoint) -> Core:
        """The core at the point."""
        return self.engine.rebuilt.restored_core(point.snapshot)


def build_branch_engine(header: Header, point: BranchPoint, changes: Changes) -> BranchEngine:
    """The engine of a run's header with the changes.

    Raises UsageError for a change that is invalid, or that the state at the point contradicts.
    """
    of_sets = {each.name: changes.of_set(each.name) for each in header.sets}
    for name, own in of_sets.items():
        with errors_of_set(name, changes):
            _check_settings(own, point)
    # The policy takes over by a fact after the snapshot, whose keys are of the one before it.
    before = structs.replace(
        changes,
        policy=None,
        of_sets={name: structs.replace(own, policy=None) for name, own in changes.of_sets.items()},
    )
    rebuilt = rebuild(structs.replace(header, s=0), before)
    sets, parts, policies = [], [], []
    for record, each in zip(changed_sets(header, rebuilt, before), rebuilt.sets, strict=True):
        spec = of_sets[record.name].policy
        chosen = resolve("policy", spec) if spec is not None else None
        policies.append(chosen.record.name if chosen is not None else "")
        sets.append(_with_policy(record, chosen.record) if chosen is not None else record)
        parts.append(_installed(each, chosen) if chosen is not None else each)
    rebuilt = rebuilt._replace(sets=parts)
    found = BranchEngine(AlternativeEngine(Alternative(changes=changes), rebuilt, sets, rebuilt.drift), policies)
    try:
        core = found.new_core(point)
    except InvariantError as error:
        raise UsageError(f"the run cannot be continued from event {point.s:,}: {error}") from error
    try:
        validate(core.state)
    except InvariantError as error:
        raise UsageError(f"{changes.describe()} contradicts the state {error}; branch elsewhere") from error
    return found


def _check_settings(changes: SetChanges, point: BranchPoint) -> None:
    fixed = [name for name in FIXED if name in changes.settings]
    if fixed:
        raise UsageError(
            f"--set {fixed[0]}: the cache at event {point.s:,} has the recorded size, which cannot change "
            "in the middle of a run; `eventlm replay` runs the whole work with another"
        )


def _with_policy(run: ReplicasetRecord, policy: PluginRecord) -> ReplicasetRecord:
    """With a further policy installed, in place of one of the same name."""
    kept = [record for record in run.plugins if (record.kind, record.name) != ("policy", policy.name)]
    return structs.replace(run, plugins=[*kept, policy])


def _installed(parts: SetParts, policy: ResolvedPlugin) -> SetParts:
    policies = parts.plugins.policies | {policy.record.name: policy.instance}
    return parts._replace(plugins=structs.replace(parts.plugins, policies=policies))


def branch_header(run: RecordedRun, point: BranchPoint, found: BranchEngine, costs: Sequence[AnyCost]) -> Header:
    """The header of a branch: what it is of, after which line of which run, and which policies decide there."""
    name = found.engine.alternative.describe() or "unchanged"
    header = simulated_header(run, found.engine, name, costs)
    slug = header.run.removeprefix(f"{run.header.run}-what-if-")
    deciding = [chosen or taken.policy for chosen, taken in zip(found.policies, point.state.sets, strict=True)]
    return structs.replace(
        header,
        run=f"{run.header.run}-branch-{point.s}-{slug}",
        previous_h=point.h,
        host={"simulated": header.host["simulated"] | {"event": point.s, "policy": ", ".join(deciding)}},
    )


def facts_after(run: RecordedRun, point: BranchPoint, found: BranchEngine) -> list[Fact]:
    """The facts of no request after the point. Other policies take over at once, and later swaps in their replicasets
    do not happen.
    """
    facts: list[Fact] = [
        PolicySwapped(ts=point.now_ns, name=policy, replicaset=index)
        for index, policy in enumerate(found.policies)
        if policy
    ]
    for fact in run.external_facts:
        if fact.s > point.s:
            changes = found.engine.alternative.changes
            facts += left_swaps(fact, run.header, changes) if isinstance(fact, PolicySwapped) else [fact]
    # Their causes have other positions here.
    return [structs.replace(fact, c=0) for fact in facts]


def left_out_swaps(run: RecordedRun, point: BranchPoint, found: BranchEngine) -> list[str]:
    """A note for each replicaset whose policy the run swapped after the point, where the branch has its own."""
    notes = []
    for index, (record, policy) in enumerate(zip(run.header.sets, found.policies, strict=True)):
        later = [
            fact.name
            for fact in run.external_facts
            if isinstance(fact, PolicySwapped) and fact.s > point.s and fact.replicaset in (-1, index)
        ]
        if policy and later:
            whose = f"{record.name}: " if len(found.policies) > 1 else ""
            notes.append(
                f"{whose}the run's policy was swapped later on ({', '.join(later)}); the branch keeps {policy}"
            )
    return notes
