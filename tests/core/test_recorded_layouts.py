"""The ranks of a run, from its header."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.config import CoreConfig
from eventlm.core.recorded_layouts import recorded_layouts
from eventlm.core.shards import Layout
from eventlm.events import Header, PluginRecord, ReplicasetRecord

PLAIN = CoreConfig(models=["m"], num_blocks=8, max_model_len=100, num_replicas=2)


def header(core: CoreConfig, **config: Any) -> Header:
    return Header(
        run="r",
        unix_start_ns="0",
        code_version="0",
        core=core,
        config=config,
        plugins=list[PluginRecord](),
        predictor=[0] * 5,
    )


def test_stages_and_groups_are_the_cores_and_tensor_ranks_the_configurations() -> None:
    core = structs.replace(PLAIN, num_stages=3, num_kv_groups=2, kv_shard_tokens=32)
    assert recorded_layouts(header(core)) == [Layout(1, 3, 2)] * 2
    assert recorded_layouts(header(core, parallel={"tensor_parallel_size": 4})) == [Layout(4, 3, 2)] * 2


@pytest.mark.parametrize("value", [0, -1, "2", None, 1 << 40])
def test_of_a_header_that_says_nonsense_there_is_one(value: object) -> None:
    assert recorded_layouts(header(PLAIN, parallel={"tensor_parallel_size": value})) == [Layout()] * 2


def test_every_replicaset_has_its_own() -> None:
    other = ReplicasetRecord(name="b", core=structs.replace(PLAIN, num_replicas=1), plugins=[], predictor=[0] * 5)
    config = {"parallel": {"tensor_parallel_size": 2}, "replicasets": {"b": {"tensor_parallel_size": 3}}}
    run = structs.replace(header(PLAIN, **config), replicasets=[other])
    assert recorded_layouts(run) == [Layout(2)] * 2 + [Layout(3)]
