"""Too many worker processes for a replica, for the memory and for the processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bootstrap.composition import compose_engine
from eventlm.bootstrap.num_workers import check_room_for_workers
from eventlm.config.load import load_config
from eventlm.errors import UsageError
from eventlm.launchers.process_memory import FAKE_PROCESS_BYTES, PROCESS_BYTES
from tests.checkpoints import make_checkpoint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threads": 3}, "--threads 3 is more than the 2 processors"),
        ({"threads": 2, "replicas": 2}, "--threads 2 of each of 2 replicas is more than"),
        ({"threads": 2}, ""),
        ({}, ""),
        ({"tensor_parallel_size": 2}, ""),
        ({"pipeline_parallel_size": 2, "replicas": 2}, "one thread of each of 4 ranks is more than the 2 processors"),
    ],
)
def test_threads_without_a_processor(
    options: dict[str, int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventlm.bootstrap.num_workers.usable_cores", lambda: 2)
    folder = make_checkpoint(tmp_path)
    warnings = compose_engine(load_config(None, {"model": str(folder), "num_blocks": 100} | options))[1]
    assert [said in warning for warning in warnings] == [True] * bool(said)


def check(*options: dict[str, object]) -> None:
    """Of replicasets with these options."""
    check_room_for_workers([load_config(None, each, environment={}) for each in options])


def test_a_replica_has_up_to_1024_ranks() -> None:
    with pytest.raises(UsageError) as caught:
        compose_engine(
            load_config(None, {"model": "fake", "tensor_parallel_size": 64, "kv_parallel_size": 17}, environment={})
        )
    assert str(caught.value) == (
        "17 KV groups of 64 tensor ranks are 1,088 ranks, and a replica has up to 1,024; lower --tensor-parallel-size "
        "or --kv-parallel-size"
    )
    # Elsewhere there may be the memory.
    check(
        {"model": "fake", "tensor_parallel_size": 64, "kv_parallel_size": 16}
        | {"launcher": {"type": "tests.launchers.loopback:LoopbackLauncher"}}
    )


def test_memory_must_hold_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    of_two_sets = ({"model": "a", "replicas": 2, "pipeline_parallel_size": 3}, {"model": "fake", "replicas": 2})
    needed = 6 * PROCESS_BYTES + 2 * FAKE_PROCESS_BYTES
    monkeypatch.setattr("eventlm.launchers.process_memory.free_bytes", lambda: needed)
    check(*of_two_sets)
    monkeypatch.setattr("eventlm.launchers.process_memory.free_bytes", lambda: needed - 1)
    with pytest.raises(UsageError) as caught:
        check(*of_two_sets)
    assert str(caught.value) == (
        "8 worker processes take at least 792 MiB beside their model, and 791 MiB of memory are free here; lower "
        "--replicas or --pipeline-parallel-size, or take more hosts with --launcher ray"
    )


def test_one_process_is_left_to_the_plan_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.launchers.process_memory.free_bytes", lambda: 0)
    check({"model": "a"})
