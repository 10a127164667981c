"""Simulates a workload and keeps what a condition may ask about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import UNSET

from eventlm.config import CacheConfig, PluginSpec, SchedulerConfig
from eventlm.config.load import load_config
from eventlm.config.plugin_spec import format_plugin_spec, parse_plugin_spec
from eventlm.errors import InvariantError
from eventlm.events import Event, PluginFailed
from eventlm.replay.cost.backend_model import AnyCost
from eventlm.replay.outcome import RunOutcome
from eventlm.replay.simulate.engine import build_engine
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.workload.workload import Workload

#: Events between two checks of the invariants, where a condition asks for them.
VALIDATE_EVERY = 16
#: Fields of the core's limits that a simulation would choose by the workload.
_CHOSEN = ("num_blocks", "max_model_len", "max_num_batched_tokens", "state_slots", "state_interval")


class Observation(NamedTuple):
    """A simulated run. outcome: None if it broke an invariant, which `broken` then says.

    workload_index: the index in the workload of each request, by its seq. num_plugin_failures: times that a plug-in
    raised or returned nonsense.
    """

    workload: Workload
    outcome: RunOutcome | None
    workload_index: dict[int, int]
    num_plugin_failures: int = 0
    broken: str = ""


def changed_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The options with changes. A policy that is replaced stays installed: the workload may swap to it. The context is
    cut to what the blocks hold, if the changes are of these and not of the context.
    """
    found = {**options, **changes}
    if ("num_blocks" in changes or "block_size" in changes) and found.get("num_blocks"):
        holds = max(found["num_blocks"] - 1, 1) * found.get("block_size", CacheConfig().block_size)
        if "max_model_len" not in changes and found.get("max_model_len", 0) > holds:
            found["max_model_len"] = holds
    specs = [parse_plugin_spec(text) for text in found.get("extra_policy", [])]
    if "policy" in changes and "policy" in options:
        specs.insert(0, _spec(options["policy"]))
    if specs:
        policy = _spec(found.get("policy", SchedulerConfig().policy))["type"]
        extra = {spec["type"]: format_plugin_spec(spec) for spec in reversed(specs) if spec["type"] != policy}
        found["extra_policy"] = list(reversed(extra.values()))
    return found


def _spec(policy: PluginSpec | str) -> PluginSpec:
    return parse_plugin_spec(policy) if isinstance(policy, str) else policy


def observe(workload: Workload, options: Mapping[str, Any], cost: AnyCost, *, validates: bool = False) -> Observation:
    """Simulate. options: of the engine's configuration, by name. validates: check the core's invariants all along.

    Raises UsageError for an engine or a workload that makes no sense.
    """
    config = load_config(None, options, environment={})
    recorded = next(iter(workload.recorded.values()), None)
    model_name = recorded.models[0] if recorded is not None else "simulated"
    engine = build_engine(config, workload, cost, model_name=model_name, recorded=recorded)
    num_plugin_failures = 0

    def see(event: Event) -> None:
        nonlocal num_plugin_failures
        num_plugin_failures += isinstance(event, PluginFailed)

    try:
        result = simulate(
            workload,
            engine.setup,
            cost,
            predictor=engine.predictor,
            subscribers=[see],
            validate_every=VALIDATE_EVERY if validates else 0,
        )
    except InvariantError as error:
        return Observation(workload, None, {}, num_plugin_failures, str(error))
    return Observation(workload, result.outcome, result.workload_index, num_plugin_failures)


def pinned_options(workload: Workload, options: Mapping[str, Any], cost: AnyCost) -> dict[str, Any]:
    """The options with everything that a simulation would else choose by the workload, so that a part of the workload
    meets the same engine. Raises UsageError as `observe` does.
    """
    config = load_config(None, options, environment={})
    recorded = next(iter(workload.recorded.values()), None)
    engine = build_engine(config, workload, cost, recorded=recorded)
    chosen = {name: value for name in _CHOSEN if (value := getattr(engine.setup.core, name)) is not UNSET}
    return {**options, **chosen, "predictor": engine.predictor}
