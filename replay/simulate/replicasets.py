"""The engine of a simulation with one replicaset or several, and the workload with each request at its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from eventlm.config import Config, CoreConfig
from eventlm.config.replicasets import TOP_REPLICASET, check_sets, configs_of_replicasets, keys_of_further
from eventlm.errors import UsageError
from eventlm.replay.cost.backend_model import AnyCost
from eventlm.replay.simulate.engine import SimulatedEngine, SimulatedSet, build_engine
from eventlm.replay.workload.incidents import renumbered
from eventlm.replay.workload.placement import place_requests
from eventlm.replay.workload.source import LoadedWorkload
from eventlm.replay.workload.workload import Workload


class PlacedEngine(NamedTuple):
    """An engine, the cost model of its first replicaset, and the workload that it gets."""

    engine: SimulatedEngine
    cost: AnyCost
    workload: Workload


def recorded_defaults(workload: Workload) -> dict[str, Any]:
    """Options of the engine that the workload is from, for `load_config`: the replicasets in their order with their
    models, if it had several.
    """
    if len(workload.recorded) < 2:
        return {}
    models = {name: core.models[0] for name, core in workload.recorded.items()}
    tables = {name: {"model": model} if name != TOP_REPLICASET else {} for name, model in models.items()}
    return {"model": models.get(TOP_REPLICASET, ""), "replicasets": tables}


def build_replicasets(config: Config, loaded: LoadedWorkload, costs: Mapping[str, AnyCost]) -> PlacedEngine:
    """Resolve a configuration as `build_engine` does, each replicaset with the requests that go to it.

    costs: by the names of the replicasets. Raises UsageError for an invalid configuration, and for requests that no
    replicaset serves.
    """
    configs = configs_of_replicasets(config)
    is_alone = len(configs) == 1
    workload = place_requests(loaded.workload, {name: _names(name, own) for name, own in configs.items()})
    sets: list[SimulatedSet] = []
    notes: list[str] = []
    for number, (name, own) in enumerate(configs.items()):
        requests = [request for request in workload.requests if request.arrival.replicaset == number]
        # One that gets no request is as large as if it got all.
        part = structs.replace(workload, requests=requests) if requests else workload
        model = loaded.model_name if is_alone else _names(name, own)[0]
        try:
            built = build_engine(own, part, costs[name], model_name=model, recorded=_recorded(workload, name, model))
        except UsageError as error:
            if is_alone:
                raise
            raise UsageError(f"replicaset {name}: {error}") from error
        setup = built.setup if is_alone else structs.replace(built.setup, name=name)
        sets.append(SimulatedSet(setup, built.predictor, costs[name]))
        notes += built.notes if is_alone else [f"{name}: {note}" for note in built.notes]
    check_sets({each.setup.name: each.setup.core for each in sets})
    first, *others = sets
    if others:
        # As the header of a server has it.
        further = keys_of_further([each.setup.config for each in sets])
        named = dict(zip([each.setup.name for each in others], further, strict=True))
        config = structs.replace(first.setup.config, replicasets=named)
        first = first._replace(setup=structs.replace(first.setup, config=config))
    if len(workload.recorded) > 1:
        before = {name: core.num_replicas for name, core in workload.recorded.items()}
        here = {name: each.setup.core.num_replicas for name, each in zip(configs, sets, strict=True)}
        workload = structs.replace(workload, incidents=renumbered(workload.incidents, before, here))
    return PlacedEngine(SimulatedEngine(first.setup, first.predictor, notes, others), first.cost, workload)


def _names(name: str, config: Config) -> list[str]:
    """The names by which requests may ask for a replicaset's model, its default name first."""
    model = config.model.model
    of_folder = Path(model).name
    is_folder = model.startswith(("/", ".", "~"))
    by_default = of_folder if is_folder else model
    return [*dict.fromkeys(filter(None, [config.model.served_model_name, by_default, model, of_folder, name]))]


def _recorded(workload: Workload, name: str, model: str) -> CoreConfig | None:
    """The limits that a replicaset had in the run that the workload is from, if it is from one."""
    recorded = workload.recorded
    if len(recorded) == 1 or name in recorded:
        return recorded.get(name) or next(iter(recorded.values()))
    return next((core for core in recorded.values() if model in core.models), None)
