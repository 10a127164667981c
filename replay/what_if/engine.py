"""Another engine for a recorded run's work: the changes, the core that results, and the facts from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, structs

from eventlm._version import __version__
from eventlm.config import CoreConfig, PluginSpec
from eventlm.config.core import MAX_REPLICAS
from eventlm.config.load import replace_fields
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.events import (
    Fact,
    Header,
    Paused,
    PluginRecord,
    PolicySwapped,
    PredictorSwapped,
    WorkerUp,
)
from eventlm.formatting import counted
from eventlm.replay.cost.model import CostModel
from eventlm.replay.rebuild import Changes, Rebuilt, rebuild
from eventlm.replay.workload.incidents import OF_REPLICA, sped_up
from eventlm.replay.workload.recorded_run import RecordedRun
from eventlm.types import PluginKind

MILLION = 1_000_000


class Alternative(Struct, frozen=True, kw_only=True):
    """Another engine, or the same work at other times.

    num_replicas: None: as many as the run had. speed_up_ppm: how much closer together requests arrive, in parts per
    million. closed_loop: the number of clients that send the requests one after the other; 0: they arrive as recorded.
    """

    changes: Changes = Changes()
    num_replicas: int | None = None
    speed_up_ppm: int = MILLION
    closed_loop: int = 0

    @property
    def follows_run(self) -> bool:
        """Whether requests arrive at the recorded times."""
        return self.speed_up_ppm == MILLION and not self.closed_loop

    def parts(self) -> dict[str, str]:
        """The changes by kind, in words."""
        changes = self.changes
        specs = {"policy": changes.policy, "batcher": changes.batcher, "router": changes.router}
        found = {kind: format_plugin_spec(spec) for kind, spec in specs.items() if spec is not None}
        if self.num_replicas is not None:
            found["replicas"] = counted(self.num_replicas, "replica")
        if changes.settings:
            found["settings"] = ", ".join(f"{name}={value}" for name, value in changes.settings.items())
        if self.speed_up_ppm != MILLION:
            found["speed_up"] = f"arrivals x {self.speed_up_ppm / MILLION:g}"
        if self.closed_loop:
            found["closed_loop"] = f"closed loop of {self.closed_loop}"
        return found

    def describe(self) -> str:
        """All changes in words; empty if there are none."""
        return ", ".join(self.parts().values())


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
    """The engine of an alternative. `notes`: its limits, for the reader of the results."""

    alternative: Alternative
    rebuilt: Rebuilt
    plugins: list[PluginRecord]
    notes: list[str]

    @property
    def config(self) -> CoreConfig:
        """The core's limits."""
        return self.rebuilt.config


def build_engine(header: Header, alternative: Alternative) -> AlternativeEngine:
    """The engine of a header with the changes. Raises UsageError for invalid ones, as an engine does at its start."""
    changes = alternative.changes
    if alternative.closed_loop < 0:
        raise UsageError(f"a closed loop of {alternative.closed_loop} clients makes no sense; it takes 1 or more")
    if alternative.speed_up_ppm <= 0:
        factor = alternative.speed_up_ppm / MILLION
        raise UsageError(f"arrivals cannot be sped up by {factor:g}: it takes a factor above 0")
    if alternative.num_replicas is not None and not 1 <= alternative.num_replicas <= MAX_REPLICAS:
        raise UsageError(f"{alternative.num_replicas} replicas make no sense; an engine has 1 to {MAX_REPLICAS}")
    if "num_replicas" in changes.settings:
        raise UsageError("--set num_replicas: say --replicas instead")
    # A log may begin in the middle of a run, with a snapshot. The alternative starts cold.
    rebuilt = rebuild(structs.replace(header, s=0), changes)
    config = rebuilt.config
    if alternative.num_replicas is not None:
        config = replace_fields(config, {"num_replicas": alternative.num_replicas}, where="--replicas")
    check_limits(config, changes)
    return AlternativeEngine(
        alternative,
        rebuilt._replace(config=config),
        changed_plugin_records(header, changes),
        rebuilt.drift + _notes(header, config),
    )


def check_limits(config: CoreConfig, changes: Changes) -> None:
    """Raise UsageError for changed limits that contradict each other, as at an engine's start."""
    is_changed = bool(changes.settings.keys() & {"max_num_batched_tokens", "max_num_seqs"})
    if is_changed and config.max_num_batched_tokens < config.max_num_seqs:
        raise UsageError(
            f"--set: max_num_batched_tokens {config.max_num_batched_tokens} is less than max_num_seqs "
            f"{config.max_num_seqs}: decodes would leave no room for a prompt; raise one or lower the other"
        )
    if config.max_tokens_per_row > 1:
        raise UsageError(f"--set max_tokens_per_row={config.max_tokens_per_row}: speculation cannot be simulated yet")


def _notes(header: Header, config: CoreConfig) -> list[str]:
    recorded = header.core
    notes = []
    if config.num_replicas != recorded.num_replicas:
        notes.append(
            f"a step is taken to cost with {counted(config.num_replicas, 'replica')} what it cost with "
            f"{recorded.num_replicas}: each has a device, or cores, of its own"
        )
    num_blocks = config.blocks_per_replica * config.num_replicas
    if 0 < header.block_table_size < num_blocks:
        notes.append(
            f"the run kept the names of {header.block_table_size:,} blocks, and here are {num_blocks:,}: a prefix that "
            "came back after its name was forgotten looks new, so more would be hit than is shown"
        )
    if config.max_model_len < recorded.max_model_len:
        notes.append(
            f"the context is cut from {recorded.max_model_len:,} to {config.max_model_len:,} tokens; longer requests "
            "are rejected"
        )
    return notes


def changed_plugin_records(header: Header, changes: Changes) -> list[PluginRecord]:
    """The plug-ins as the header of a run with the changes has them; the first of each kind is the one that runs."""
    asked: dict[PluginKind, PluginSpec | None] = {
        "policy": changes.policy,
        "batcher": changes.batcher,
        "router": changes.router,
    }
    records = list(header.plugins)
    for kind, spec in asked.items():
        index = next((index for index, record in enumerate(records) if record.kind == kind), None)
        if spec is not None and index is not None:
            records[index] = resolve(kind, spec).record
    return records


def simulated_header(run: RecordedRun, engine: AlternativeEngine, name: str, cost: CostModel) -> Header:
    """The header of a simulated run, with the run that it is made from and the cost model."""
    description: dict[str, Any] = {
        "run": run.header.run,
        "changes": engine.alternative.describe(),
        "cost_model": msgspec.to_builtins(cost),
    }
    slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
    return structs.replace(
        run.header,
        s=0,
        ts=0,
        c=0,
        previous_h="",
        code_version=__version__,
        run=f"{run.header.run}-what-if-{slug}",
        core=engine.config,
        # These describe the engine that was recorded.
        config={},
        config_hash="",
        plugins=engine.plugins,
        model_fingerprint="",
        level="default",
        host={"simulated": description},
    )


def external_facts_of(run: RecordedRun, engine: AlternativeEngine) -> list[Fact]:
    """The facts from outside that apply to the alternative, out of those that the run had."""
    num_replicas = engine.config.num_replicas
    external_facts = _cold_start(run) + run.external_facts
    ups = [fact for fact in external_facts if isinstance(fact, WorkerUp) and fact.replica == 0]
    found: list[Fact] = []
    for fact in external_facts:
        if isinstance(fact, OF_REPLICA) and fact.replica >= num_replicas:
            continue
        if isinstance(fact, PolicySwapped) and engine.alternative.changes.policy is not None:
            continue
        found.append(fact)
        if ups and fact is ups[0]:
            found += [
                structs.replace(fact, replica=replica, epoch=1)
                for replica in range(run.header.core.num_replicas, num_replicas)
            ]
    # Their causes have other positions here.
    found = [structs.replace(fact, c=0) for fact in found]
    requests, factor_ppm = run.workload.requests, engine.alternative.speed_up_ppm
    if factor_ppm == MILLION or not requests:
        return found
    return sped_up(found, first_ns=requests[0].arrival_ns, factor_ppm=factor_ppm)


def _cold_start(run: RecordedRun) -> list[Fact]:
    """For a log that begins in the middle of a run: facts that bring a new engine to its state, without its caches."""
    start, now_ns = run.start, run.header.ts
    if start is None:
        return []
    found: list[Fact] = [
        WorkerUp(ts=now_ns, replica=index, epoch=replica.epoch)
        for index, replica in enumerate(start.replicas)
        if replica.up
    ]
    first = next(record.name for record in run.header.plugins if record.kind == "policy")
    if start.policy != first:
        found.append(PolicySwapped(ts=now_ns, name=start.policy))
    if start.predictor != run.header.predictor:
        found.append(PredictorSwapped(ts=now_ns, coefficients=start.predictor))
    if start.paused:
        found.append(Paused(ts=now_ns))
    return found
