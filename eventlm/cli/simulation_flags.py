"""What `eventlm simulate` and `eventlm sweep` have in common: a workload, a cost model, an engine's configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eventlm.cli.config_flags import add_flag, config_from_arguments
from eventlm.cli.parser import Parser
from eventlm.config.options import options
from eventlm.errors import UsageError
from eventlm.types import parts_per_million

if TYPE_CHECKING:
    from eventlm.config import Config
    from eventlm.replay.cost_model import CostModel
    from eventlm.replay.simulated_engine import SimulatedEngine
    from eventlm.replay.workload import Workload

WORKLOAD_HELP = "a workload file, a recorded trace or the folder of a run"
COST_MODEL_HELP = (
    "what a step costs: a built-in model such as h200-llama3-8b, a TOML file, or a recorded run to fit one to"
)
#: Options of the configuration that mean something without a worker, a server and a recorder.
ENGINE_OPTIONS = (
    "policy", "batcher", "router", "replicas", "max_model_len", "block_size", "num_blocks", "prefix_cache",
    "max_num_seqs", "max_num_batched_tokens", "max_queue_len", "max_steps_in_flight", "max_decodes_in_flight_per_seq",
    "max_skips", "max_evictions", "predictor",
)  # fmt: skip
_TRACE_BEGINS = b'{"t":"header"'
#: Beyond that, arrivals come within a nanosecond of each other.
MAX_SPEED_UP = 1_000_000


class Ingredients(NamedTuple):
    """All that a simulation needs."""

    workload: Workload
    cost: CostModel
    engine: SimulatedEngine


class LoadedWorkload(NamedTuple):
    """A workload, and of a recorded one the name of its model and how many blocks a replica had."""

    workload: Workload
    model_name: str = "simulated"
    num_blocks: int = 0


def add_engine_flags(parser: Parser, *, without: tuple[str, ...] = ()) -> None:
    """The flags of `eventlm serve` that a simulated engine has, and `--config`."""
    group = parser.add_argument_group("engine (as of `eventlm serve`)")
    group.add_argument("--config", metavar="FILE", help="TOML file, as of the server; flags beat it")
    for name in ENGINE_OPTIONS:
        if name not in without:
            add_flag(group, options()[name])


def parse_speed_up(text: str, flag: str) -> int:
    """A factor of the load in parts per million. Raises UsageError for what is none."""
    try:
        factor_ppm = parts_per_million(text)
    except ValueError:
        factor_ppm = 0
    if not 0 < factor_ppm <= MAX_SPEED_UP * 1_000_000:
        raise UsageError(f"{flag} {text}: a factor above 0 and up to {MAX_SPEED_UP:,} is needed, such as 1.5")
    return factor_ppm


def load_workload(text: str) -> LoadedWorkload:
    """A workload from a file of its own, or of a recorded run. Raises UsageError, and what LogReader raises."""
    from eventlm.cli.progress import file_progress
    from eventlm.cli.trace_path import trace_file
    from eventlm.replay.recorded_run import read_run
    from eventlm.replay.workload_file import read_workload

    path = trace_file(text)
    if Path(path).is_file() and not _is_trace(path):
        return LoadedWorkload(read_workload(path))
    with file_progress("reading", path) as on_progress:
        run = read_run(path, on_progress=on_progress)
    return LoadedWorkload(run.workload, run.header.core.models[0], run.header.core.num_blocks)


def _is_trace(path: str) -> bool:
    """Whether a file begins as a trace does. What begins as nothing known is taken for a broken workload."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_TRACE_BEGINS)) == _TRACE_BEGINS
    except OSError as error:
        raise UsageError(f"cannot read the workload {path}: {error.strerror}") from error


def load_cost(text: str) -> CostModel:
    """The cost model of a name, a file or a recorded run. Raises UsageError, and what LogReader raises."""
    from eventlm.replay.cost_files import load_cost_model

    return load_cost_model(text)


def load_ingredients(arguments: argparse.Namespace) -> Ingredients:
    """What the flags name, read and resolved. Raises UsageError, and what LogReader raises."""
    from eventlm.replay.simulated_engine import build_engine

    config: Config = config_from_arguments(arguments)
    cost = load_cost(arguments.cost_model)
    loaded = load_workload(arguments.workload)
    engine = build_engine(
        config, loaded.workload, cost, model_name=loaded.model_name, recorded_blocks=loaded.num_blocks
    )
    return Ingredients(loaded.workload, cost, engine)
