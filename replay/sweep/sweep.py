"""A sweep: configurations x loads, each a simulation in a separate process, and the capacity of each configuration.

Results are in `DIR/cells`, one file for each cell. A cell with a file does not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from eventlm.config import PluginSpec
from eventlm.config.load import load_config
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.config.replicasets import configs_of_replicasets
from eventlm.core.shards import Layout
from eventlm.engine.setup import resolve_plugins
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.replay.cost.files import FileCost
from eventlm.replay.pool.pool import ProcessPool
from eventlm.replay.simulate.replicasets import build_replicasets
from eventlm.replay.simulate.summary import SimulationSummary
from eventlm.replay.sweep.cell import CellResult, CellSpec, code_hash, read_finished, write_finished
from eventlm.replay.sweep.slo import Capacity, Limit, capacity, keeps, load_between
from eventlm.replay.workload.source import LoadedWorkload, workload_hash
from eventlm.types import OnProgress

CELLS_FOLDER = "cells"
WORKER = "eventlm.replay.sweep.worker"


class Configuration(Struct, frozen=True, kw_only=True):
    """An engine of the sweep."""

    policy: PluginSpec
    batcher: PluginSpec
    router: PluginSpec
    num_replicas: int
    layout: Layout = Layout()

    @property
    def options(self) -> dict[str, Any]:
        """As options of the engine's configuration."""
        return {
            "policy": self.policy,
            "batcher": self.batcher,
            "router": self.router,
            "replicas": self.num_replicas,
            "tensor_parallel_size": self.layout.tensor,
            "pipeline_parallel_size": self.layout.stages,
            "kv_parallel_size": self.layout.groups,
        }


class SweepPlan(Struct, frozen=True, kw_only=True):
    """What to simulate. loads_ppm: factors on the arrival rate; num_refinements: further loads between the highest that
    keeps the limits and the lowest that does not, for each configuration. costs: by replicaset. options: of every
    engine.
    """

    workload_path: str
    costs: dict[str, FileCost]
    configurations: list[Configuration]
    loads_ppm: list[int]
    limits: list[Limit]
    options: dict[str, Any] = {}
    num_refinements: int = 0


class ConfigurationResult(Struct, frozen=True, kw_only=True):
    """A configuration's results by load, in ascending order, and its capacity."""

    name: str
    configuration: Configuration
    summaries: dict[int, SimulationSummary]
    errors: dict[int, str]
    kept: dict[int, bool]
    capacity: Capacity | None


class SweepResult(Struct, frozen=True, kw_only=True):
    """The result of a sweep. `num_run` of `num_cells` had no result from an earlier one.

    requests_per_second: arrivals at a load of 1; 0 if all arrive at once.
    """

    plan: SweepPlan
    configurations: list[ConfigurationResult]
    num_cells: int
    num_run: int
    requests_per_second: float


class _GridCell(NamedTuple):
    """A cell of the grid: the index of a configuration, and a load."""

    configuration: int
    load_ppm: int


class Sweep:
    """Raises UsageError for invalid configurations and loads before anything runs."""

    def __init__(self, plan: SweepPlan, loaded: LoadedWorkload, folder: Path | str, *, num_jobs: int) -> None:
        if num_jobs < 1:
            raise UsageError(f"--jobs {num_jobs}: at least 1 is needed")
        if plan.num_refinements < 0:
            raise UsageError(f"--refine {plan.num_refinements}: 0 or more are needed")
        if plan.num_refinements and not plan.limits:
            raise UsageError("--refine looks for the capacity at an SLO, which needs --slo")
        self._plan = plan
        self._num_jobs = num_jobs
        self._folder = Path(folder) / CELLS_FOLDER
        self._hash = workload_hash(plan.workload_path)
        self._code = code_hash()
        self._plugin_hashes = [self._check(each, loaded) for each in plan.configurations]
        self._summaries: dict[_GridCell, SimulationSummary] = {}
        self._errors: dict[_GridCell, str] = {}
        self._num_cells = self._num_run = 0
        requests = loaded.workload.requests
        duration_ns = loaded.workload.duration_ns
        self._requests_per_second = (len(requests) - 1) * 1e9 / duration_ns if duration_ns else 0.0

    def run(self, *, on_progress: OnProgress | None = None) -> SweepResult:
        """Run all cells without a result. `on_progress` gets how many cells are done, and their total.

        Raises UsageError if the folder cannot be written. Finished cells are kept, also after an interrupt.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            plan = self._plan
            cells = [
                _GridCell(index, load_ppm)
                for load_ppm, index in product(sorted(set(plan.loads_ppm)), range(len(plan.configurations)))
            ]
            self._run(cells, on_progress)
            for _ in range(plan.num_refinements):
                between = [
                    (index, load_between(capacity(self._kept(index)))) for index in range(len(plan.configurations))
                ]
                cells = [_GridCell(index, load_ppm) for index, load_ppm in between if load_ppm is not None]
                if not cells:
                    break
                self._run(cells, on_progress)
        except OSError as error:
            raise UsageError(f"--output {self._folder.parent}: cannot be written: {error.strerror}") from error
        return self._result()

    def _check(self, configuration: Configuration, loaded: LoadedWorkload) -> list[str]:
        """Check the configuration by building its engine; returns the hashes of its plug-ins."""
        config = load_config(None, self._plan.options | configuration.options, environment={})
        build_replicasets(config, loaded, self._plan.costs)
        of_sets = [resolve_plugins(own.scheduler) for own in configs_of_replicasets(config).values()]
        return [plugin.record.source_hash for own in of_sets for plugin in (own.policy, own.batcher, own.router)]

    def _spec(self, cell: _GridCell) -> CellSpec:
        plan = self._plan
        return CellSpec(
            workload=str(Path(plan.workload_path).resolve()),
            workload_hash=self._hash,
            costs=plan.costs,
            options=plan.options | plan.configurations[cell.configuration].options,
            load_ppm=cell.load_ppm,
            plugin_hashes=self._plugin_hashes[cell.configuration],
            code=self._code,
        )

    def _run(self, cells: Sequence[_GridCell], on_progress: OnProgress | None) -> None:
        by_key: dict[str, _GridCell] = {}
        missing = []
        num_done = self._num_cells
        self._num_cells += len(cells)
        for cell in cells:
            spec = self._spec(cell)
            summary = read_finished(self._folder, spec)
            if summary is None:
                by_key[spec.key] = cell
                missing.append(spec)
            else:
                self._summaries[cell] = summary
        num_done += len(cells) - len(missing)

        def on_result(spec: CellSpec, result: CellResult) -> None:
            nonlocal num_done
            num_done += 1
            cell = by_key[spec.key]
            if result.summary is None:
                self._errors[cell] = result.error
            else:
                write_finished(self._folder, spec, result.summary)
                self._summaries[cell] = result.summary
            if on_progress is not None:
                on_progress(num_done, self._num_cells)

        if on_progress is not None:
            on_progress(num_done, self._num_cells)
        self._num_run += len(missing)
        pool: ProcessPool[CellSpec, CellResult] = ProcessPool(WORKER, CellResult, _failed, num_jobs=self._num_jobs)
        with pool:
            pool.run(missing, on_result)

    def _kept(self, index: int) -> dict[int, bool]:
        """Whether each load kept the limits; a failed cell counts as a miss."""
        limits = self._plan.limits
        kept = {c.load_ppm: keeps(found, limits) for c, found in self._summaries.items() if c.configuration == index}
        kept |= {c.load_ppm: False for c in self._errors if c.configuration == index}
        return dict(sorted(kept.items()))

    def _result(self) -> SweepResult:
        plan = self._plan
        results = []
        for index, (name, configuration) in enumerate(
            zip(configuration_names(plan.configurations), plan.configurations, strict=True)
        ):
            summaries = {c.load_ppm: found for c, found in self._summaries.items() if c.configuration == index}
            errors = {c.load_ppm: error for c, error in self._errors.items() if c.configuration == index}
            kept = self._kept(index) if plan.limits else {}
            results.append(
                ConfigurationResult(
                    name=name,
                    configuration=configuration,
                    summaries=dict(sorted(summaries.items())),
                    errors=dict(sorted(errors.items())),
                    kept=kept,
                    capacity=capacity(kept) if plan.limits else None,
                )
            )
        return SweepResult(
            plan=plan,
            configurations=results,
            num_cells=self._num_cells,
            num_run=self._num_run,
            requests_per_second=self._requests_per_second,
        )


def _failed(error: str) -> CellResult:
    return CellResult(error=error)


def make_configurations(
    policies: Sequence[PluginSpec],
    batchers: Sequence[PluginSpec],
    routers: Sequence[PluginSpec],
    replicas: Sequence[int],
    layouts: Sequence[Layout] = (Layout(),),
) -> list[Configuration]:
    """All combinations, each once."""
    found: list[Configuration] = []
    for policy, batcher, router, num_replicas, layout in product(policies, batchers, routers, replicas, layouts):
        each = Configuration(policy=policy, batcher=batcher, router=router, num_replicas=num_replicas, layout=layout)
        if each not in found:
            found.append(each)
    return found


def configuration_names(configurations: Sequence[Configuration]) -> list[str]:
    """Policy and batcher of each; router and replicas if they differ, and ranks if any has more than one."""
    has_routers = len({format_plugin_spec(each.router) for each in configurations}) > 1
    has_replicas = len({each.num_replicas for each in configurations}) > 1
    has_ranks = any(each.layout.num_ranks > 1 for each in configurations)
    names = []
    for each in configurations:
        words = [format_plugin_spec(each.policy), format_plugin_spec(each.batcher)]
        words += [format_plugin_spec(each.router)] if has_routers else []
        words += [counted(each.num_replicas, "replica")] if has_replicas else []
        words += [each.layout.describe() or "1 rank"] if has_ranks else []
        names.append(" ".join(words))
    return names
