"""What `eventlm simulate` and `eventlm sweep` have in common: a workload, a cost model, an engine's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from eventlm.cli.config_flags import add_flag, add_specs_flag, config_from_arguments, given_options
from eventlm.cli.output import file_progress, warn
from eventlm.cli.parser import Parser
from eventlm.cli.trace_path import trace_file
from eventlm.config.load import load_config
from eventlm.config.options import ENGINE_OPTIONS, REPLICASETS, options
from eventlm.config.replicasets import configs_of_replicasets, split_replicaset_spec
from eventlm.errors import UsageError
from eventlm.types import parts_per_million

if TYPE_CHECKING:
    from eventlm.config import Config
    from eventlm.replay.cost.files import FileCost
    from eventlm.replay.simulate.replicasets import PlacedEngine
    from eventlm.replay.workload.source import LoadedWorkload

WORKLOAD_HELP = "a workload file, a recorded trace or the folder of a run"
#: Key of `--replicaset` beside the options.
COST_MODEL = "cost_model"
COST_MODEL_HELP = (
    "what a step costs: a TOML file, a recorded run to fit a model to, or one of a100-llama3-8b, a100x4-llama3-70b, "
    "h200-llama3-8b, h200x4-llama3-70b; with a run of backends, or backends:KEY=NUMBER,..., replicas are such servers"
)
#: Beyond that, arrivals come within a nanosecond of each other.
MAX_SPEED_UP = 1_000_000


def add_engine_flags(parser: Parser, *, without: tuple[str, ...] = ()) -> None:
    """The flags of `eventlm serve` that a simulated engine has, and `--config`."""
    group = parser.add_argument_group("engine (as of `eventlm serve`)")
    group.add_argument("--config", metavar="FILE", help="TOML file, as of the server; flags override it")
    for name in ENGINE_OPTIONS:
        if name not in without:
            add_flag(group, options()[name])


def add_replicaset_flag(parser: Parser) -> None:
    """`--replicaset` as of `eventlm serve`, each with a cost model of its own if it is given one."""
    group = parser.add_argument_group("Replicasets (as of `eventlm serve`)")
    add_specs_flag(
        group,
        "a model of the engine, with any of the options above and cost_model, such as "
        "small:cost_model=h200-llama3-8b,replicas=2; the rest is as without it; may be repeated. Requests go by the "
        "model that they name: a set's name, or its model if it has that key; those that name none go to the first. Of "
        "a run with several replicasets they are there without being named",
    )


def engine_options(config: Config, given: Container[str], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Options of the engine that are not their defaults, whether flags or a file say so, by name. given: as flags."""
    found = {}
    for name in ENGINE_OPTIONS:
        option = options()[name]
        value = getattr(getattr(config, option.section), name)
        if name not in without and (name in given or value != option.default):
            found[name] = value
    return found


def given_engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same of a command that takes one replicaset."""
    return engine_options(config_from_arguments(arguments), given_options(arguments))


def parse_speed_up(text: str, flag: str) -> int:
    """A factor of the load in parts per million. Raises UsageError."""
    try:
        factor_ppm = parts_per_million(text)
    except ValueError:
        factor_ppm = 0
    if not 0 < factor_ppm <= MAX_SPEED_UP * 1_000_000:
        raise UsageError(f"{flag} {text}: a factor above 0 and up to {MAX_SPEED_UP:,} is needed, such as 1.5")
    return factor_ppm


def read_cost_model(text: str, replicaset: str = "") -> FileCost:
    """The model that `--cost-model` names, of this replicaset where it is a run with several; `latest` is the newest
    run. Raises UsageError, and what LogReader raises.
    """
    from eventlm.replay.cost.files import load_cost_model

    path = trace_file(text)
    with file_progress("fitting a cost model", path) as on_progress:
        return load_cost_model(path, replicaset, on_progress=on_progress)


def read_workload(text: str) -> LoadedWorkload:
    """The workload that an argument names; warns of a torn trace. Raises UsageError, and what LogReader raises."""
    from eventlm.replay.workload.source import load_workload

    path = trace_file(text)
    with file_progress("reading", path) as on_progress:
        loaded = load_workload(path, on_progress=on_progress)
    warn(loaded.warnings)
    return loaded


class SimulatedConfig(NamedTuple):
    """The configuration of a simulated engine, and by replicaset what its cost model was called, and that model."""

    config: Config
    names: dict[str, str]
    costs: dict[str, FileCost]


def read_simulated_config(arguments: argparse.Namespace, loaded: LoadedWorkload) -> SimulatedConfig:
    """What the flags say of the engine. Of a run with several replicasets these are there without being named.

    Raises UsageError, and what LogReader raises.
    """
    from eventlm.replay.simulate.replicasets import recorded_defaults

    given = given_options(arguments)
    tables: dict[str, dict[str, str]] = {}
    for spec in given.pop(REPLICASETS, []):
        name, table = split_replicaset_spec(spec, example="cost_model=h200-llama3-8b,replicas=2")
        if name in tables:
            raise UsageError(f"--replicaset {spec}: two replicasets are called {name}; give one another name")
        tables[name] = table
    own = {name: table.pop(COST_MODEL) for name, table in tables.items() if COST_MODEL in table}
    defaults = recorded_defaults(loaded.workload)
    there = load_config(arguments.config, given, defaults=defaults).replicasets
    # A simulation needs no checkpoint, so a further set may be called by its name alone.
    named = {name: table if name in there else {"model": name} | table for name, table in tables.items()}
    config = load_config(arguments.config, given | ({REPLICASETS: named} if named else {}), defaults=defaults)
    names = {name: own.get(name, arguments.cost_model) for name in configs_of_replicasets(config)}
    for name, text in names.items():
        if text is None:
            whose = f" for the replicaset {name}, or it a cost_model of its own" if len(names) > 1 else ""
            raise UsageError(f"give --cost-model{whose}: what a step costs")
    return SimulatedConfig(config, names, {name: read_cost_model(text, name) for name, text in names.items()})


def load_ingredients(arguments: argparse.Namespace) -> tuple[PlacedEngine, str]:
    """All that a simulation needs, as the flags name it, and the cost models in words. Raises UsageError, and what
    LogReader raises.
    """
    from eventlm.replay.simulate.replicasets import build_replicasets

    loaded = read_workload(arguments.workload)
    config, names, costs = read_simulated_config(arguments, loaded)
    placed = build_replicasets(config, loaded, costs)
    engine = placed.engine._replace(notes=[*placed.engine.notes, *loaded.notes])
    return placed._replace(engine=engine), in_words(names)


def in_words(names: Mapping[str, str]) -> str:
    """The cost models of replicasets: one for all, or that of each."""
    return names[next(iter(names))] if len({*names.values()}) == 1 else ", ".join(map(": ".join, names.items()))
