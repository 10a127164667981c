from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.replay.predicate.observation import pinned_options
from eventlm.replay.predicate.recorded_options import recorded_options
from eventlm.replay.workload.source import load_workload
from tests.replay.golden import FOLDER
from tests.replay.made_workloads import COST

GOLDEN = FOLDER / "edf_tight.jsonl"


def test_a_simulation_gets_the_recorded_engine() -> None:
    with LogReader(GOLDEN) as log:
        header = log.header
    options = recorded_options(header)
    assert options["policy"]["type"] == "edf"
    assert options["num_blocks"] == header.core.num_blocks
    assert options["replicas"] == header.core.num_replicas
    assert options["predictor"] == header.predictor
    workload = load_workload(GOLDEN, with_incidents=True).workload
    pinned = pinned_options(workload, options, COST)
    assert {name: pinned[name] for name in ("num_blocks", "max_model_len", "max_num_batched_tokens")} == {
        name: getattr(header.core, name) for name in ("num_blocks", "max_model_len", "max_num_batched_tokens")
    }
    assert recorded_options(header, {"policy": "lrs", "num_blocks": 99})["policy"] == "lrs"


def test_local_code_runs_only_where_it_is_trusted() -> None:
    with LogReader(GOLDEN) as log:
        plugins = [
            structs.replace(each, name="mine:Policy") if each.kind == "policy" else each for each in log.header.plugins
        ]
        header = structs.replace(log.header, plugins=plugins)
    with pytest.raises(UsageError, match=r"mine:Policy.*--trust-local-plugins.*--policy"):
        recorded_options(header)
    assert recorded_options(header, trust_local_plugins=True)["policy"]["type"] == "mine:Policy"
    assert recorded_options(header, {"policy": "fcfs"}).get("extra_policy", []) == []
