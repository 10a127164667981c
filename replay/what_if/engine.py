"""Another engine for a recorded run's work: the changes, the core that results, and the facts from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET, Struct, structs

from eventlm._version import __version__
from eventlm.config import CoreConfig
from eventlm.config.core import MAX_REPLICAS, check_together
from eventlm.config.load import replace_fields
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.core.state.snapshot import ReplicaSnapshot
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.events import (
    BackendUp,
    Fact,
    Header,
    Paused,
    PluginRecord,
    PolicySwapped,
    PredictorSwapped,
    Recovered,
    ReplicasetRecord,
    WorkerUp,
)
from eventlm.formatting import counted
from eventlm.replay.cost.backend_model import AnyCost, describe_costs
from eventlm.replay.rebuild import Changes, Rebuilt, SetChanges, check_set_names, errors_of_set, rebuild
from eventlm.replay.workload.incidents import ranges_of_replicas, renumbered, sped_up
from eventlm.replay.workload.recorded_run import RecordedRun

MILLION = 1_000_000

#: What a run at other servers does not show.
_NOTES_OF_BACKENDS = [
    "the backends' other clients are taken to be as they were, and what a backend preempts or drops of its own accord "
    "is part of its noise",
    "attempts fail as often as they did at that backend, the same ones on every engine; backends go down and come back "
    "when they did",
]


class Alternative(Struct, frozen=True, kw_only=True):
    """Another engine, or the same work at other times.

    num_replicas: of each replicaset, None: as many as the run had; replicas_of_sets: of one, by its name.
    speed_up_ppm: how much closer together requests arrive, in parts per million. closed_loop: the number of clients
    that send the requests one after the other; 0: they arrive as recorded.
    """

    changes: Changes = Changes()
    num_replicas: int | None = None
    replicas_of_sets: dict[str, int] = {}
    speed_up_ppm: int = MILLION
    closed_loop: int = 0

    @property
    def follows_run(self) -> bool:
        """Whether requests arrive at the recorded times."""
        return self.speed_up_ppm == MILLION and not self.closed_loop

    def parts(self) -> dict[str, str]:
        """The changes by kind, in words."""
        changes = self.changes
        found: dict[str, str] = _parts(changes, self.num_replicas)
        for name in {**changes.of_sets, **self.replicas_of_sets}:
            own = _parts(changes.of_sets.get(name, SetChanges()), self.replicas_of_sets.get(name))
            found[f"replicaset {name}"] = f"{name}: {', '.join(own.values())}"
        if self.speed_up_ppm != MILLION:
            found["speed_up"] = f"arrivals x {self.speed_up_ppm / MILLION:g}"
        if self.closed_loop:
            found["closed_loop"] = f"closed loop of {self.closed_loop}"
        return found

    def describe(self) -> str:
        """All changes in words; empty if there are none."""
        return ", ".join(self.parts().values())


def _parts(changes: SetChanges, num_replicas: int | None) -> dict[str, str]:
    found: dict[str, str] = {kind: format_plugin_spec(spec) for kind, spec in changes.plugins().items()}
    if num_replicas is not None:
        found["replicas"] = counted(num_replicas, "replica")
    if changes.settings:
        found["settings"] = ", ".join(f"{name}={value}" for name, value in changes.settings.items())
    return found


def names(alternatives: Sequence[Alternative]) -> list[str]:
    """A short name for each, without what all have in common, unless nothing else is left."""
    all_parts = [alternative.parts() for alternative in alternatives]
    common = {
        kind
        for kind in (all_parts[0] if all_parts else {})
        if len(all_parts) > 1 and len({parts.get(kind) for parts in all_parts}) == 1
    }
    found = []
    for parts in all_parts:
        own = [text for kind, text in parts.items() if kind not in common]
        found.append(", ".join(own) or ", ".join(parts.values()) or "as recorded")
    return [name if found.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(found, start=1)]


class AlternativeEngine(NamedTuple):
    """The engine of an alternative. sets: its replicasets, as a header has them. `notes`: its limits, for the reader of
    the results.
    """

    alternative: Alternative
    rebuilt: Rebuilt
    sets: list[ReplicasetRecord]
    notes: list[str]


def build_engine(header: Header, alternative: Alternative) -> AlternativeEngine:
    """The engine of a header with the changes. Raises UsageError for invalid ones, as an engine does at its start."""
    changes = alternative.changes
    if alternative.closed_loop < 0:
        raise UsageError(f"a closed loop of {alternative.closed_loop} clients makes no sense; it takes 1 or more")
    if alternative.speed_up_ppm <= 0:
        factor = alternative.speed_up_ppm / MILLION
        raise UsageError(f"arrivals cannot be sped up by {factor:g}: it takes a factor above 0")
    if "num_replicas" in changes.settings:
        raise UsageError("--set num_replicas: say --replicas instead")
    for name, own in changes.of_sets.items():
        if "num_replicas" in own.settings:
            raise UsageError(f"--replicaset {name}: num_replicas: say replicas instead")
    check_set_names(header, alternative.replicas_of_sets)
    # A log may begin in the middle of a run, with a snapshot. The alternative starts cold.
    rebuilt = rebuild(structs.replace(header, s=0), changes)
    parts = [
        each._replace(config=_with_replicas(each.config, record.name, alternative))
        for record, each in zip(header.sets, rebuilt.sets, strict=True)
    ]
    try:
        check_together([each.config for each in parts])
    except ValueError as error:
        raise UsageError(f"{alternative.describe()}: {error}") from error
    rebuilt = rebuilt._replace(sets=parts)
    sets = changed_sets(header, rebuilt, changes)
    return AlternativeEngine(alternative, rebuilt, sets, rebuilt.drift + _notes(header, sets))


def _with_replicas(config: CoreConfig, name: str, alternative: Alternative) -> CoreConfig:
    """The limits of a replicaset with as many replicas as the alternative has."""
    is_own = name in alternative.replicas_of_sets
    num_replicas = alternative.replicas_of_sets[name] if is_own else alternative.num_replicas
    if num_replicas is None:
        return config
    where = f"replicaset {name}: replicas" if is_own else "--replicas"
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise UsageError(f"{where}: {num_replicas} replicas make no sense; an engine has 1 to {MAX_REPLICAS}")
    return replace_fields(config, {"num_replicas": num_replicas}, where=where)


def check_limits(config: CoreConfig, changes: SetChanges) -> None:
    """Raise UsageError for changed limits that contradict each other, as at an engine's start."""
    is_changed = config.forwards is UNSET and bool(changes.settings.keys() & {"max_num_batched_tokens", "max_num_seqs"})
    if is_changed and config.max_num_batched_tokens < config.max_num_seqs:
        raise UsageError(
            f"--set: max_num_batched_tokens {config.max_num_batched_tokens} is less than max_num_seqs "
            f"{config.max_num_seqs}: decodes would leave no room for a prompt; raise one or lower the other"
        )
    if config.max_tokens_per_row > 1:
        raise UsageError(f"--set max_tokens_per_row={config.max_tokens_per_row}: speculation cannot be simulated yet")


def _notes(header: Header, sets: Sequence[ReplicasetRecord]) -> list[str]:
    found = []
    for recorded, record in zip(header.sets, sets, strict=True):
        whose = f"{record.name}: " if len(sets) > 1 else ""
        found += [whose + note for note in _notes_of_set(recorded, record.core)]
    return found


def _notes_of_set(run: ReplicasetRecord, config: CoreConfig) -> list[str]:
    recorded = run.core
    notes = []
    if config.forwards is not UNSET:
        notes += _NOTES_OF_BACKENDS
    elif config.num_replicas != recorded.num_replicas:
        notes.append(
            f"a step is taken to cost with {counted(config.num_replicas, 'replica')} what it cost with "
            f"{recorded.num_replicas}: each has a device, or cores, of its own"
        )
    num_blocks = config.blocks_per_replica * config.num_replicas
    # A run has replicas for backends that never came.
    is_as_large = config.forwards is not UNSET and config.num_replicas == recorded.num_replicas
    if 0 < run.block_table_size < num_blocks and not is_as_large:
        notes.append(
            f"the run kept the names of {run.block_table_size:,} blocks, and here are {num_blocks:,}: a prefix that "
            "came back after its name was forgotten looks new, so more would be hit than is shown"
        )
    if config.max_model_len < recorded.max_model_len:
        notes.append(
            f"the context is cut from {recorded.max_model_len:,} to {config.max_model_len:,} tokens; longer requests "
            "are rejected"
        )
    return notes


def changed_sets(header: Header, rebuilt: Rebuilt, changes: Changes) -> list[ReplicasetRecord]:
    """The replicasets as the header of the simulated run has them. Raises UsageError as `check_limits` does."""
    found = []
    for record, parts in zip(header.sets, rebuilt.sets, strict=True):
        own = changes.of_set(record.name)
        with errors_of_set(record.name, changes):
            check_limits(parts.config, own)
        plugins = _changed_plugin_records(record.plugins, own)
        # The rest describes the workers that were recorded.
        found.append(structs.replace(record, core=parts.config, plugins=plugins, model_fingerprint="", host={}))
    return found


def _changed_plugin_records(records: Sequence[PluginRecord], changes: SetChanges) -> list[PluginRecord]:
    """The records of the plug-ins, the first of a changed kind replaced."""
    found = list(records)
    for kind, spec in changes.plugins().items():
        index = next(index for index, record in enumerate(found) if record.kind == kind)
        found[index] = resolve(kind, spec).record
    return found


def simulated_header(run: RecordedRun, engine: AlternativeEngine, name: str, costs: Sequence[AnyCost]) -> Header:
    """The header of a simulated run, with the run that it is made from and the cost model of each replicaset."""
    description: dict[str, Any] = {
        "run": run.header.run,
        "changes": engine.alternative.describe(),
        **describe_costs([each.name for each in engine.sets], costs),
    }
    slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
    return structs.replace(
        run.header.with_sets(engine.sets),
        s=0,
        ts=0,
        c=0,
        previous_h="",
        code_version=__version__,
        run=f"{run.header.run}-what-if-{slug}",
        # These describe the engine that was recorded.
        config={},
        config_hash="",
        level="default",
        host={"simulated": description},
    )


def external_facts_of(run: RecordedRun, engine: AlternativeEngine) -> list[Fact]:
    """The facts from outside that apply to the alternative, out of those that the run had."""
    changes = engine.alternative.changes
    before, here = ({each.name: each.core.num_replicas for each in sets} for sets in (run.header.sets, engine.sets))
    facts = renumbered(_cold_start(run) + run.external_facts, before, here)
    further = _further_replicas(facts, engine, before)
    later, epoch = dict(further), 1
    found: list[Fact] = []
    for fact in facts:
        if isinstance(fact, Recovered):
            # Nothing was computed while there was no engine.
            fact = structs.replace(fact, ts=fact.ts - fact.down_ns)
        found += left_swaps(fact, run.header, changes) if isinstance(fact, PolicySwapped) else [fact]
        if isinstance(fact, Recovered):
            later, epoch = dict(further), epoch + 1
        elif isinstance(fact, WorkerUp | BackendUp):
            found += [structs.replace(fact, replica=number, epoch=epoch) for number in later.pop(fact.replica, ())]
    # Their causes have other positions here.
    found = [structs.replace(fact, c=0) for fact in found]
    requests, factor_ppm = run.workload.requests, engine.alternative.speed_up_ppm
    if factor_ppm == MILLION or not requests:
        return found
    return sped_up(found, first_ns=requests[0].arrival_ns, factor_ppm=factor_ppm)


def _further_replicas(
    facts: Sequence[Fact], engine: AlternativeEngine, before: Mapping[str, int]
) -> dict[int, list[int]]:
    """The replicas that the run did not have, by the one of their set with which they come up."""
    found: dict[int, list[int]] = {}
    alternative = engine.alternative
    ranges = ranges_of_replicas([each.core.num_replicas for each in engine.sets])
    for record, own in zip(engine.sets, ranges, strict=True):
        if record.core.forwards is UNSET:
            found[own.start] = [*own[before[record.name] :]]
        elif alternative.replicas_of_sets.get(record.name, alternative.num_replicas) is not None:
            # A run has replicas for backends that never came.
            known = [fact.replica for fact in facts if isinstance(fact, BackendUp) and fact.replica in own]
            if known:
                found[known[0]] = [number for number in own if number not in known]
    return found


def left_swaps(fact: PolicySwapped, header: Header, changes: Changes) -> list[Fact]:
    """What is left of a swap of the run where some replicasets have a policy of their own."""
    kept = [index for index, each in enumerate(header.sets) if changes.of_set(each.name).policy is None]
    if len(kept) == len(header.sets):
        return [fact]
    return [structs.replace(fact, replicaset=index) for index in kept if fact.replicaset in (-1, index)]


def _cold_start(run: RecordedRun) -> list[Fact]:
    """For a log that begins in the middle of a run: facts that bring a new engine to its state, without its caches."""
    start, now_ns = run.start, run.header.ts
    if start is None:
        return []
    found: list[Fact] = [_up(index, replica, now_ns) for index, replica in enumerate(start.replicas) if replica.up]
    for index, (record, taken) in enumerate(zip(run.header.sets, start.sets, strict=True)):
        first = next(plugin.name for plugin in record.plugins if plugin.kind == "policy")
        if taken.policy != first:
            found.append(PolicySwapped(ts=now_ns, name=taken.policy, replicaset=index))
        if taken.predictor != record.predictor:
            found.append(PredictorSwapped(ts=now_ns, coefficients=taken.predictor, replicaset=index))
    if start.paused:
        found.append(Paused(ts=now_ns))
    return found


def _up(index: int, replica: ReplicaSnapshot, now_ns: int) -> Fact:
    """The fact that a replica of a snapshot is up."""
    capacity = replica.capacity
    if capacity is UNSET:
        return WorkerUp(ts=now_ns, replica=index, epoch=replica.epoch)
    return BackendUp(
        ts=now_ns, replica=index, epoch=replica.epoch, name=f"backend {index}", weight_ppm=capacity.weight_ppm
    )
