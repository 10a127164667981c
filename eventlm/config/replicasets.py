"""Several replicasets in one configuration: what is at the top, and what each of them has of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from eventlm.config.backends import BACKEND_KEYS
from eventlm.config.core import CoreConfig, check_together
from eventlm.config.options import options
from eventlm.config.secrets import hide_keys
from eventlm.config.structs import Config, GatewayConfig, GpuConfig, ModelConfig, ParallelConfig, WorkerConfig
from eventlm.errors import UsageError

#: What the replicaset of the options at the top is called.
TOP_REPLICASET = "main"
#: The sections whose keys a replicaset can have of its own.
SECTIONS_OF_REPLICASETS = ("model", "cache", "scheduler", "worker", "gpu", "parallel", "gateway")
#: They belong to the model that the top names; a replicaset with another model does not take them from there.
_OF_ITS_MODEL = ("revision", "served_model_name", "predictor")
#: Options that only own workers have. A set of backends does not take them from the top, and has none of its own.
OF_OWN_WORKERS = (
    *(name for name in ModelConfig.__struct_fields__ if name not in ("served_model_name", "max_model_len")),
    "num_blocks", "kv_memory", "kv_cache_dtype", "state_slots", "state_interval", "isolate_prefix_cache",
    "batcher", "replicas", "max_num_batched_tokens", "max_steps_in_flight", "max_decodes_in_flight_per_seq",
    "run_ahead_ms", "predictor", "predictor_cache",
    *(name for name in WorkerConfig.__struct_fields__ if name != "heartbeat_timeout_seconds"),
    *GpuConfig.__struct_fields__, *ParallelConfig.__struct_fields__,
)  # fmt: skip
#: In a spec of a replicaset the keys of a backend go on to the next key that is none of them.
_BACKEND = "backend"


class ReplicasetSpec(NamedTuple):
    """What `--replicaset` says: a name, and keys with their values as texts; of `backend` one for each."""

    name: str
    table: dict[str, Any]


def split_replicaset_spec(spec: str, *, example: str) -> ReplicasetSpec:
    """`NAME:KEY=VALUE,...` in its parts. example: of a key and a value, for who gives none. Raises UsageError."""
    name, _, text = spec.partition(":")
    where = f"--replicaset {hide_keys(spec)}"
    if not text:
        raise UsageError(f"{where}: it says nothing of the replicaset; write NAME:KEY=VALUE, such as {name}:{example}")
    table: dict[str, Any] = {}
    key = ""
    for part in text.split(","):
        before, equals, value = part.partition("=")
        name_of_key = before.strip()
        if equals and name_of_key == _BACKEND:
            key = _BACKEND
            table.setdefault(key, []).append(value.strip())
        elif key == _BACKEND and (not equals or name_of_key in BACKEND_KEYS):
            table[key][-1] += f",{part}"
        elif equals and name_of_key in table:
            raise UsageError(f"{where}: it gives {name_of_key} twice")
        elif equals:
            key = name_of_key
            table[key] = value.strip()
        elif key:
            # A list, such as the predictor's coefficients.
            table[key] += f",{part}"
        else:
            raise UsageError(f"{where}: {hide_keys(part)!r} is not of the form KEY=VALUE")
    return ReplicasetSpec(name, table)


def configs_of_replicasets(config: Config) -> dict[str, Config]:
    """The configuration of each replicaset by its name, in the order of the engine's sets.

    The first is that of the options at the top, unless they leave the model empty, which they may where others are
    named. What a set does not say is as at the top.
    """
    alone = structs.replace(config, replicasets={})
    has_top = config.model.model or config.gateway.backend or not config.replicasets
    found = {TOP_REPLICASET: alone} if has_top else {}
    for name, keys in config.replicasets.items():
        tables: dict[str, Any] = msgspec.to_builtins(alone)
        not_taken: Sequence[str] = ()
        if keys.get("backend"):
            not_taken = (*OF_OWN_WORKERS, *_OF_ITS_MODEL, "max_model_len")
        elif keys.get("model", config.model.model) != config.model.model:
            not_taken = (*_OF_ITS_MODEL, *GatewayConfig.__struct_fields__)
        for key in not_taken:
            tables[options()[key].section][key] = options()[key].default
        if keys.get("backend"):
            tables["model"]["model"] = ""
        for key, value in keys.items():
            tables[options()[key].section][key] = value
        found[name] = msgspec.convert(tables, Config)
    return found


def keys_of_further(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """The options that each replicaset after the first has otherwise than the first."""
    named = [option for option in options().values() if option.section in SECTIONS_OF_REPLICASETS]

    def of(config: Config) -> dict[str, Any]:
        tables = msgspec.to_builtins(config)
        return {option.name: tables[option.section][option.name] for option in named}

    first, *others = map(of, configs)
    return [{name: value for name, value in own.items() if value != first[name]} for own in others]


def check_sets(cores: Mapping[str, CoreConfig]) -> None:
    """Raise UsageError for replicasets, by their names, that cannot be told apart or are more than an engine can
    have.
    """
    check_served_names({name: core.models for name, core in cores.items()})
    try:
        check_together([*cores.values()])
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_served_names(models: Mapping[str, Sequence[str]]) -> None:
    """Raise UsageError if two replicasets serve one name; models: what each serves, by the names of the sets."""
    served: dict[str, str] = {}
    for name, own in models.items():
        for model in own:
            if model in served:
                raise UsageError(
                    f"the replicasets {served[model]} and {name} both serve {model!r}, and requests go by that name; "
                    "give one another served_model_name"
                )
            served[model] = name


def first_replicaset(config: Config) -> Config:
    """The configuration of the first replicaset, which commands without a server take."""
    return next(iter(configs_of_replicasets(config).values()))
