"""What can be run again, on which model, and what is said where nothing can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.config import WorkerConfig
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.replay.execute.executable import check_executable, computed, recorded_model
from tests.replay.backend_runs import record_backends
from tests.replay.executions import execute_fake, record_with_tokens
from tests.replay.traces import Objects, tampered


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_with_tokens(tmp_path, 1, num_requests=2)


def change_trace(run: Path, change: Callable[[Objects], Any]) -> None:
    tampered(run / "trace.jsonl", run / "trace.jsonl", change)


def test_a_log_that_begins_in_the_middle_cannot_be_run(tmp_path: Path) -> None:
    run = record_with_tokens(tmp_path, 1, segment_bytes=4096)
    assert execute_fake(run / "trace-000000000000.jsonl").exit_code == 0
    with pytest.raises(
        UsageError, match=r"begins at event \d+, in the middle of the run.*\(give the run's folder .*seed-1"
    ):
        check_executable(run / "trace.jsonl")
    (run / "trace-000000000000.jsonl").unlink()
    with pytest.raises(UsageError, match=r"larger --record-keep"):
        execute_fake(run)


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("config", {"model": {"fake": 5}}, "model.fake"),
        ("config", {"worker": {"step_timeout_seconds": "long"}}, "worker.step_timeout_seconds"),
        ("host", {"threads": 10**9}, "host.threads"),
        ("host", {"device": []}, "host.device"),
    ],
)
def test_what_no_engine_has_recorded_of_its_work_is_damage(run: Path, field: str, value: object, where: str) -> None:
    change_trace(run, lambda objects: objects[0].update({field: value}))
    with pytest.raises(TraceCorruptError, match=rf"damaged at line 1, .*how the run was computed: .*{where}"):
        check_executable(run)


def test_options_that_another_version_has_are_no_damage(run: Path) -> None:
    change_trace(run, lambda objects: objects[0].update(config={"model": {"unknown": 1}, "new": {"a": 1}}))
    assert computed(check_executable(run)).worker == WorkerConfig()


def test_the_header_says_which_model_ran(run: Path) -> None:
    header = check_executable(run)
    assert recorded_model(header).model == "fake"
    assert recorded_model(header, "there").model == "there"
    change_trace(run, lambda objects: objects[0]["config"].update(model={"model": "acme/tiny", "revision": "v1"}))
    # Who says the name of the same repository means that of the run.
    for given, revision in ((None, "v1"), ("acme/tiny", "v1"), ("acme/other", "")):
        assert recorded_model(check_executable(run), given).revision == revision
    change_trace(run, lambda objects: objects[0].update(config={}))
    with pytest.raises(UsageError, match="give its folder with --model"):
        recorded_model(check_executable(run))
    change_trace(run, lambda objects: objects[0].update(config={"model": {"model": 5}}))
    with pytest.raises(UsageError, match=r"names no model that can be read \(Expected `str`.*give its folder with"):
        recorded_model(check_executable(run))


def test_what_other_servers_have_computed_is_refused(tmp_path: Path) -> None:
    path = record_backends(tmp_path, 9)
    with pytest.raises(UsageError, match="requests for backends were forwarded to other servers"):
        check_executable(path)
