"""Several replicasets in one configuration: what is at the top, and what each of them has of its own."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from eventlm.config.options import options
from eventlm.config.structs import Config

#: What the replicaset of the options at the top is called.
TOP_REPLICASET = "main"
#: The sections whose keys a replicaset can have of its own.
SECTIONS_OF_REPLICASETS = ("model", "cache", "scheduler", "worker", "gpu", "parallel")
#: They belong to the model that the top names; a replicaset with another model does not take them from there.
_OF_ITS_MODEL = ("revision", "served_model_name", "predictor")


def configs_of_replicasets(config: Config) -> dict[str, Config]:
    """The configuration of each replicaset by its name, in the order of the engine's sets.

    The first is that of the options at the top, unless they leave the model empty, which they may where others are
    named. What a set does not say is as at the top.
    """
    alone = structs.replace(config, replicasets={})
    found = {TOP_REPLICASET: alone} if config.model.model or not config.replicasets else {}
    for name, keys in config.replicasets.items():
        tables: dict[str, Any] = msgspec.to_builtins(alone)
        if keys.get("model", config.model.model) != config.model.model:
            for key in _OF_ITS_MODEL:
                tables[options()[key].section][key] = options()[key].default
        for key, value in keys.items():
            tables[options()[key].section][key] = value
        found[name] = msgspec.convert(tables, Config)
    return found


def first_replicaset(config: Config) -> Config:
    """The configuration of the first replicaset, which commands without a server take."""
    return next(iter(configs_of_replicasets(config).values()))
