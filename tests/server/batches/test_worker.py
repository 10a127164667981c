"""Running batches: after a restart, on a full disk, by the limits of their keys, in turn, and until they expire."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from eventlm.engine.request import EngineUnavailableError, QueueFullError
from eventlm.server.app import APIS_BY_PREFIX
from eventlm.server.batches.lines import OutputLine
from eventlm.server.batches.results import Results
from eventlm.server.batches.worker import apis_by_path
from eventlm.server.openai.chat import CHAT
from eventlm.server.openai.completions import COMPLETIONS
from eventlm.server.openai.embeddings import EMBEDDINGS, Embeddings
from eventlm.server.responses.create import RESPONSES
from tests.processes import wait_until
from tests.server.batches.full_disk import FullDisk
from tests.server.batches.input_files import chat_line, contents, create, results, wait_for
from tests.server.batches.test_batches import KEYS, write_keys
from tests.server.conftest import RunningServer, assert_serves

Start = Callable[..., tuple[RunningServer, openai.OpenAI]]
ANSWER = "Hello, world"


@pytest.fixture
def start(start_with_client: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr("eventlm.server.batches.worker.DISK_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("eventlm.server.batches.worker.POLL_SECONDS", 0.02)
    monkeypatch.setattr("eventlm.server.batches.line_runner.RETRY_SECONDS", 0.01)
    return lambda **settings: start_with_client(
        **{"batch_dir": str(tmp_path / "batches"), "batch_window": 2} | settings
    )


def lines(num_lines: int) -> list[dict[str, Any]]:
    return [chat_line(f"r{number}") for number in range(num_lines)]


def hold_after(server: RunningServer, num_answers: int) -> None:
    """Let the engine say so many answers and then wait."""
    server.engine.most_said = num_answers * len(ANSWER)


def let_go(server: RunningServer) -> None:
    server.engine.most_said = 10**9


def state_files(folder: Path, suffix: str = ".json") -> list[Path]:
    return [path for path in folder.rglob("batch_*") if path.suffix.startswith(suffix)]


def num_written(folder: Path) -> int:
    """Lines in the results on the disk."""
    return sum(path.read_bytes().count(b'"response"') for path in folder.rglob("file-*.jsonl"))


def test_a_path_names_one_api() -> None:
    assert apis_by_path(APIS_BY_PREFIX) == {api.path: api for api in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)}
    with pytest.raises(ValueError, match="two APIs have the path /v1/embeddings: embd- and other-"):
        apis_by_path({"embd-": EMBEDDINGS, "other-": OtherEmbeddings()})


class OtherEmbeddings(Embeddings):
    prefix = "other-"


def test_what_was_done_is_not_done_again_after_a_restart(start: Start, tmp_path: Path) -> None:
    server, client = start(drain_seconds=0)
    hold_after(server, 7)
    batch_id = create(client, *lines(30))
    wait_until(lambda: server.engine.num_said == server.engine.most_said)
    server.stop()
    num_done = num_written(tmp_path)
    other, again = start()
    batch = wait_for(again, batch_id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 30)
    assert contents(results(again, batch.output_file_id)) == {f"r{number}": ANSWER for number in range(30)}
    assert 5 <= num_done <= 7
    assert len(other.engine.requests) == 30 - num_done
    assert batch.usage.output_tokens == 30 * len(ANSWER)


def test_a_drain_lets_lines_that_run_end_and_starts_no_others(start: Start) -> None:
    server, client = start(drain_seconds=60)
    server.engine.step_seconds = 0.005
    batch_id = create(client, *lines(200))
    wait_until(lambda: server.engine.num_said > 5 * len(ANSWER))
    server.call(drain(server))
    assert server.engine.cancelled == []
    num_requests = len(server.engine.requests)
    assert server.context.num_running == 0
    server.stop()
    assert len(server.engine.requests) == num_requests
    other, again = start()
    wait_for(again, batch_id)
    assert len(other.engine.requests) == 200 - num_requests


async def drain(server: RunningServer) -> None:
    await server.context.drain(asyncio.Event())


def test_a_full_disk_stops_batches_and_nothing_else_until_there_is_room(start: Start, tmp_path: Path) -> None:
    disk = FullDisk()
    server, client = start(disk=disk)
    hold_after(server, 5)
    batch_id = create(client, *lines(20))
    wait_until(lambda: server.engine.num_said == server.engine.most_said)
    disk.room = 200
    let_go(server)
    batch = wait_until(lambda: (batch := client.batches.retrieve(batch_id)).errors and batch)
    [error] = batch.errors.data
    assert (batch.status, error.code) == ("in_progress", "disk_full")
    assert "No space left on device" in error.message
    num_requests = len(server.engine.requests)
    assert_serves(server)
    assert len(server.engine.requests) == num_requests + 1
    disk.room = None
    batch = wait_for(client, batch_id)
    assert (batch.status, batch.errors, batch.request_counts.completed) == ("completed", None, 20)
    assert len(contents(results(client, batch.output_file_id))) == 20
    # Nothing was lost, nor done again.
    assert len(server.engine.requests) == 20 + 1
    assert [path.suffix for path in state_files(tmp_path, ".")] == [".json"]


def test_a_batch_that_waits_for_a_full_disk_can_be_cancelled(start: Start) -> None:
    disk = FullDisk()
    server, client = start(disk=disk)
    hold_after(server, 5)
    batch_id = create(client, *lines(20))
    wait_until(lambda: server.engine.num_said == server.engine.most_said)
    disk.room = 100
    let_go(server)
    wait_until(lambda: client.batches.retrieve(batch_id).errors)
    client.batches.cancel(batch_id)
    wait_until(lambda: server.context.num_running == 0)
    disk.room = None
    batch = wait_for(client, batch_id)
    assert batch.status == "cancelled"
    assert len(contents(results(client, batch.output_file_id))) == batch.request_counts.completed


def test_a_full_disk_does_not_keep_a_server_from_ending(start: Start) -> None:
    disk = FullDisk()
    server, client = start(disk=disk, drain_seconds=60)
    hold_after(server, 1)
    batch_id = create(client, *lines(5))
    wait_until(lambda: server.engine.num_said == server.engine.most_said)
    disk.room = 0
    let_go(server)
    wait_until(lambda: client.batches.retrieve(batch_id).errors)
    server.call(drain(server))
    server.stop()
    _, again = start()
    assert wait_for(again, batch_id).request_counts.completed == 5


def test_a_batch_waits_for_the_limits_of_its_key(start: Start, tmp_path: Path) -> None:
    limited = KEYS + "limits = { concurrent_requests = 1 }\n"
    server, client = start(api_keys_file=write_keys(tmp_path, limited), batch_window=4)
    server.engine.step_seconds = 0.001
    bob = client.with_options(api_key="sk-bob")
    batch = wait_for(bob, create(bob, *lines(5)))
    assert batch.request_counts.model_dump() == {"total": 5, "completed": 5, "failed": 0}
    assert server.engine.limiter.refused[""] > 0


def test_a_batch_does_not_use_up_the_limits_of_its_key(start: Start, tmp_path: Path) -> None:
    limited = KEYS + "limits = { concurrent_requests = 1, requests_per_minute = 3 }\n"
    server, client = start(api_keys_file=write_keys(tmp_path, limited), batch_window=4)
    bob = client.with_options(api_key="sk-bob", max_retries=0)
    server.engine.most_said = 0
    batch_id = create(bob, *lines(2))
    wait_until(lambda: server.engine.limiter.refused[""] > 0)
    let_go(server)
    for _ in range(3):
        bob.chat.completions.create(model="test", messages=[{"role": "user", "content": "hi"}])
    assert wait_for(bob, batch_id).request_counts.completed == 2
    with pytest.raises(openai.RateLimitError):
        bob.chat.completions.create(model="test", messages=[{"role": "user", "content": "hi"}])


def test_a_line_that_its_key_never_may_is_an_error(start: Start, tmp_path: Path) -> None:
    limited = KEYS + "limits = { tokens_per_minute = 100 }\n"
    _, client = start(api_keys_file=write_keys(tmp_path, limited))
    bob = client.with_options(api_key="sk-bob")
    batch = wait_for(bob, create(bob, chat_line("a", max_tokens=90), chat_line("b", max_tokens=5)))
    assert [line["custom_id"] for line in results(bob, batch.output_file_id)] == ["b"]
    [line] = results(bob, batch.error_file_id)
    assert (line["custom_id"], line["response"]["status_code"]) == ("a", 429)


@pytest.mark.parametrize("error", [QueueFullError("full"), EngineUnavailableError("loading")])
def test_a_batch_waits_for_the_engine(start: Start, error: Any) -> None:
    server, client = start()
    server.engine.submit_error = error
    batch_id = create(client, *lines(3))
    wait_until(lambda: server.engine.num_groups >= 1)
    server.engine.submit_error = None
    assert wait_for(client, batch_id).request_counts.completed == 3


def test_lines_whose_worker_was_lost_are_run_again(start: Start) -> None:
    server, client = start()
    hold_after(server, 1)
    batch_id = create(client, *lines(4))
    wait_until(lambda: server.engine.num_said == server.engine.most_said)
    server.loop.call_soon_threadsafe(server.engine.fail, EngineUnavailableError("the worker was lost"))
    let_go(server)
    batch = wait_for(client, batch_id)
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 4, "failed": 0}


def test_a_batch_of_a_key_that_is_gone_waits_for_it(start: Start, tmp_path: Path) -> None:
    path = Path(write_keys(tmp_path))
    server, client = start(api_keys_file=str(path))
    bob = client.with_options(api_key="sk-bob")
    hold_after(server, 3)
    batch_id = create(bob, *lines(10))
    wait_until(lambda: server.engine.num_said == server.engine.most_said)
    path.write_text(KEYS.partition('[[keys]]\nname = "bob"')[0])
    assert server.call(reload(server))
    let_go(server)
    num_requests = wait_until(lambda: server.context.num_running == 0 and len(server.engine.requests))
    alice = client.with_options(api_key="sk-alice")
    assert wait_for(alice, create(alice, *lines(2))).status == "completed"
    assert len(server.engine.requests) == num_requests + 2
    path.write_text(KEYS)
    assert server.call(reload(server))
    assert wait_for(bob, batch_id).request_counts.completed == 10


async def reload(server: RunningServer) -> bool:
    return server.context.keys.reload()


def test_few_lines_run_while_there_are_other_requests(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.server.batches.window.POLL_SECONDS", 0.01)
    monkeypatch.setattr("eventlm.server.batches.window.QUIET_SECONDS", 0.1)
    server, client = start(batch_window=8)
    server.engine.num_requests_of_others = 1
    server.engine.most_said = 0
    batch_id = create(client, *lines(20))
    wait_until(lambda: len(server.engine.actions) > 3)
    assert len(server.engine.requests) == 2
    server.engine.num_requests_of_others = 0
    wait_until(lambda: len(server.engine.requests) == 8)
    let_go(server)
    assert wait_for(client, batch_id).request_counts.completed == 20


def test_batches_of_a_key_run_in_turn_and_keys_beside_each_other(start: Start, tmp_path: Path) -> None:
    server, client = start(api_keys_file=write_keys(tmp_path), batch_window=4)
    alice, bob = (client.with_options(api_key=f"sk-{name}") for name in ("alice", "bob"))
    server.engine.most_said = 0
    first, second = (create(alice, *lines(2)) for _ in range(2))
    other = create(bob, *lines(2))
    wait_until(lambda: len(server.engine.requests) == 4)
    running = {handle for batch in (first, other) for handle in (f"{batch}/r0", f"{batch}/r1")}
    known = [reply.submission.request_id for reply in server.engine.registry._replies.values()]
    assert set(known) == running
    let_go(server)
    ends = [wait_for(alice, first), wait_for(alice, second), wait_for(bob, other)]
    assert {batch.status for batch in ends} == {"completed"}


def test_an_expired_batch_says_which_lines_were_not_run(start: Start, tmp_path: Path) -> None:
    server, client = start(drain_seconds=0)
    hold_after(server, 3)
    batch_id = create(client, *lines(10))
    wait_until(lambda: server.engine.num_said == server.engine.most_said)
    server.stop()
    [path] = state_files(tmp_path)
    state = json.loads(path.read_text())
    state["batch"]["expires_at"] = state["batch"]["created_at"] - 1
    path.write_text(json.dumps(state))
    _, again = start()
    batch = wait_for(again, batch_id)
    assert (batch.status, batch.expired_at is not None) == ("expired", True)
    done = contents(results(again, batch.output_file_id))
    errors = results(again, batch.error_file_id)
    assert len(done) + len(errors) == 10
    assert batch.request_counts.model_dump() == {"total": 10, "completed": len(done), "failed": len(errors)}
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert not done.keys() & {line["custom_id"] for line in errors}


def test_results_stay_within_the_storage_of_their_key(start: Start) -> None:
    _, client = start(batch_storage="8KiB")
    batch = wait_for(client, create(client, *lines(30)))
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == ["storage_limit_exceeded"]
    assert 5 < len(results(client, batch.output_file_id)) == batch.request_counts.completed < 30


def test_an_input_that_somebody_has_removed(start: Start, tmp_path: Path) -> None:
    server, client = start(drain_seconds=0, batch_window=1)
    hold_after(server, 1)
    batch_id = create(client, *lines(5))
    wait_until(lambda: num_written(tmp_path) == 1)
    server.stop()
    state = json.loads(state_files(tmp_path)[0].read_text())
    for path in tmp_path.rglob(state["batch"]["input_file_id"] + ".*"):
        os.unlink(path)
    _, again = start()
    batch = wait_for(again, batch_id)
    assert (batch.status, [error.code for error in batch.errors.data]) == ("failed", ["input_file_not_found"])
    assert len(results(again, batch.output_file_id)) == 1


def test_results_that_a_power_failure_has_damaged_are_made_again(start: Start, tmp_path: Path) -> None:
    server, client = start(drain_seconds=0, batch_window=1)
    hold_after(server, 5)
    batch_id = create(client, *lines(10))
    wait_until(lambda: num_written(tmp_path) == 5)
    server.stop()
    [output] = [path for path in tmp_path.rglob("file-*.jsonl") if b'"response"' in path.read_bytes()]
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join([*whole[:3], b"\0" * 100 + b"\n", *whole[4:]]))
    other, again = start()
    batch = wait_for(again, batch_id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 10)
    assert contents(results(again, batch.output_file_id)) == {f"r{number}": ANSWER for number in range(10)}
    assert len(other.engine.requests) == 7


def test_a_batch_ends_as_failed_after_an_error_that_nobody_expects(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = start()
    add = Results.add

    def fail_once(self: Results, line: OutputLine) -> None:
        if len(self.ended) == 3:
            raise RuntimeError("a bug")
        add(self, line)

    monkeypatch.setattr(Results, "add", fail_once)
    batch = wait_for(client, create(client, *lines(10)))
    assert (batch.status, [error.code for error in batch.errors.data]) == ("failed", ["server_error"])
    assert len(results(client, batch.output_file_id)) == batch.request_counts.completed == 3
    monkeypatch.undo()
    assert wait_for(client, create(client, *lines(2))).status == "completed"


def test_one_of_two_servers_runs_the_batches_and_the_other_takes_over(start: Start) -> None:
    (first, client), (second, other) = start(drain_seconds=0), start()
    batch_ids = [create(each, *lines(5)) for each in (client, other)]
    for batch_id in batch_ids:
        assert wait_for(other, batch_id).status == "completed"
    assert sorted(len(server.engine.requests) for server in (first, second)) == [0, 10]
    runner, rest = (first, second) if first.engine.requests else (second, first)
    client_left = other if rest is second else client
    runner.stop()
    assert wait_for(client_left, create(client_left, *lines(3))).status == "completed"
    assert len(rest.engine.requests) == 3
