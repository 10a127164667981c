"""What `eventlm simulate` and `eventlm sweep` have in common: a workload, a cost model, an engine's configuration."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from eventlm.cli.config_flags import add_flag, config_from_arguments, given_options
from eventlm.cli.output import file_progress, warn
from eventlm.cli.parser import Parser
from eventlm.cli.trace_path import trace_file
from eventlm.config.options import ENGINE_OPTIONS, options
from eventlm.errors import UsageError
from eventlm.types import parts_per_million

if TYPE_CHECKING:
    from eventlm.replay.cost.model import CostModel, LinearCost
    from eventlm.replay.cost.roofline import RooflineCost
    from eventlm.replay.simulate.engine import SimulatedEngine
    from eventlm.replay.workload.source import LoadedWorkload
    from eventlm.replay.workload.workload import Workload

WORKLOAD_HELP = "a workload file, a recorded trace or the folder of a run"
COST_MODEL_HELP = (
    "what a step costs: a TOML file, a recorded run to fit a model to, or one of a100-llama3-8b, a100x4-llama3-70b, "
    "h200-llama3-8b, h200x4-llama3-70b"
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


def engine_options(arguments: argparse.Namespace, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Options of the engine that are not their defaults, whether flags or a file say so, by name."""
    config, given = config_from_arguments(arguments), given_options(arguments)
    found = {}
    for name in ENGINE_OPTIONS:
        option = options()[name]
        value = getattr(getattr(config, option.section), name)
        if name not in without and (name in given or value != option.default):
            found[name] = value
    return found


def parse_speed_up(text: str, flag: str) -> int:
    """A factor of the load in parts per million. Raises UsageError."""
    try:
        factor_ppm = parts_per_million(text)
    except ValueError:
        factor_ppm = 0
    if not 0 < factor_ppm <= MAX_SPEED_UP * 1_000_000:
        raise UsageError(f"{flag} {text}: a factor above 0 and up to {MAX_SPEED_UP:,} is needed, such as 1.5")
    return factor_ppm


def read_cost_model(text: str) -> LinearCost | RooflineCost:
    """The model that `--cost-model` names; `latest` is the newest run. Raises UsageError, and what LogReader raises."""
    from eventlm.replay.cost.files import load_cost_model

    path = trace_file(text)
    with file_progress("fitting a cost model", path) as on_progress:
        return load_cost_model(path, on_progress=on_progress)


def read_workload(text: str) -> LoadedWorkload:
    """The workload that an argument names; warns of a torn trace. Raises UsageError, and what LogReader raises."""
    from eventlm.replay.workload.source import load_workload

    path = trace_file(text)
    with file_progress("reading", path) as on_progress:
        loaded = load_workload(path, on_progress=on_progress)
    warn(loaded.warnings)
    return loaded


def load_ingredients(arguments: argparse.Namespace) -> tuple[Workload, CostModel, SimulatedEngine]:
    """All that a simulation needs, as the flags name it. Raises UsageError, and what LogReader raises."""
    from eventlm.replay.simulate.engine import build_engine

    config = config_from_arguments(arguments)
    cost = read_cost_model(arguments.cost_model)
    loaded = read_workload(arguments.workload)
    engine = build_engine(config, loaded.workload, cost, model_name=loaded.model_name, recorded=loaded.recorded)
    return loaded.workload, cost, engine._replace(notes=[*engine.notes, *loaded.notes])
