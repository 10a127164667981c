"""What a launcher that plans memory on its hosts learns about each rank."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from eventlm.bootstrap import cache_plan, rank_parts
from eventlm.bootstrap.cache_plan import check_kv_memory, plan_cache, plan_states
from eventlm.bootstrap.composition import compose_engine
from eventlm.bootstrap.rank_parts import plans_here, rank_memory
from eventlm.config import Config
from eventlm.config.core import most_blocks
from eventlm.config.load import load_config
from eventlm.engine.setup import worker_setups
from eventlm.errors import UsageError
from eventlm.launchers.launcher import Launcher
from eventlm.models.served import read_served
from tests.checkpoints import make_checkpoint

LAYOUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


class Elsewhere(Launcher, frozen=True, kw_only=True):
    """Would find hosts."""

    plans_memory: ClassVar[bool] = True


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a host that has no memory for anything."""
    for name in ("free_bytes", "total_bytes"):
        monkeypatch.setattr(cache_plan, name, lambda: 0)
    return make_checkpoint(tmp_path)


def config_with(**options: object) -> Config:
    launcher = {"type": "tests.bootstrap.test_rank_parts:Elsewhere"}
    return load_config(None, {"dtype": "float32", "launcher": launcher} | options, environment={})


def test_only_such_a_launcher_plans() -> None:
    assert plans_here(load_config(None, {}, environment={}))
    assert not plans_here(config_with())


def test_the_memory_of_this_host_decides_nothing(model: Path) -> None:
    longest = read_served(model, "auto").max_position_embeddings
    assert plan_cache(config_with(), model) == (0, longest, [])
    assert plan_cache(config_with(max_model_len=32), model) == (0, 32, [])
    assert plan_cache(config_with(num_blocks=100, max_model_len=32), model).num_blocks == 100
    assert plan_cache(config_with(kv_memory="1MiB", max_model_len=32), model).num_blocks > 100
    check_kv_memory(config_with(model=str(model), kv_memory="1MiB"))
    with pytest.raises(UsageError, match="--kv-memory 1B is too little"):
        plan_cache(config_with(kv_memory="1B"), model)


def test_recurrent_layers_get_all_slots_that_sequences_need(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cache_plan, rank_parts):
        monkeypatch.setattr(module, "state_bytes", lambda part: 1000)
    config, warnings = plan_states(config_with(max_num_seqs=8), model)
    assert (config.cache.state_slots, config.scheduler.max_num_seqs, warnings) == (16, 8, [])
    [memory] = rank_memory(config, model, {}, num_blocks=0, num_pools=1)
    assert memory.states == 16_000


def test_the_ranks_together_take_what_a_plan_counts_for_a_replica(model: Path) -> None:
    config = config_with(**LAYOUT, num_blocks=50, max_model_len=32)
    memory = rank_memory(config, model, {}, num_blocks=50, num_pools=3)
    sizes = cache_plan._sizes(config, read_served(model, "auto"), {})
    assert len(memory) == 4
    assert sum(each.weights for each in memory) == sizes.weights
    assert sum(each.position for each in memory) == sizes.position
    assert sum(each.block for each in memory) == sizes.block
    assert sizes.activations <= sum(each.activations for each in memory) < sizes.activations + 4
    assert {(each.min_context, each.most_blocks) for each in memory} == {(32, most_blocks(3))}


def test_each_rank_is_set_up_with_its_own(model: Path) -> None:
    engine, _ = compose_engine(config_with(model=str(model), replicas=2, **LAYOUT))
    setups = worker_setups(engine.setup)
    assert [setup.num_blocks for setup in setups] == [0] * 8
    assert [setup.memory for setup in setups] == engine.setup.memory * 2
    # Others have nothing to plan.
    local, _ = compose_engine(load_config(None, {"model": "fake"}, environment={}))
    assert [setup.memory for setup in worker_setups(local.setup)] == [None]
