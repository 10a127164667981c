"""Batches of a real server: restarts in the middle, people who come in between, and several front ends."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from eventlm.events import Arrived, Preempted
from tests.cli.conftest import RunHere, StartServer
from tests.cli.test_front_ends import front_end_pids, log_lines
from tests.processes import wait_until
from tests.server.batches.input_files import chat_line, contents, create, results, wait_for
from tests.serving import Server, fake_text, verified

#: A step of 10 ms.
SLOW = "base_ns=10000000"
NUM_TOKENS = 8
NUM_LINES = 24


def lines(num_lines: int, **fields: Any) -> list[dict[str, Any]]:
    given = {"model": "fake", "max_tokens": NUM_TOKENS} | fields
    return [chat_line(f"r{seed}", seed=seed, **given) for seed in range(num_lines)]


def answers(num_lines: int) -> dict[str, str]:
    return {f"r{seed}": fake_text(seed, NUM_TOKENS) for seed in range(num_lines)}


def written(folder: Path) -> list[str]:
    """The custom_ids in the results on the disk, of which no input is one."""
    found = []
    for path in folder.glob("anyone/files/file-*.jsonl"):
        whole = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        found += [line["custom_id"] for line in whole if "response" in line]
    return found


def test_a_batch_goes_on_after_a_crash_and_after_an_orderly_end(start_server: StartServer, tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    flags = ("--model", "fake", "--fake", SLOW, "--batch-dir", str(folder), "--batch-window", "3")
    server = start_server(*flags)
    with server.client() as client:
        batch_id = create(client, *lines(NUM_LINES))
    before: list[str] = []
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        wait_until(partial(has_grown, folder, before))
        assert server.stop(number=number) == code
        trace, done = server.trace, written(folder)
        if code == 0:
            # Those that ran were let go to their end.
            assert verified(trace).finish_reasons == {"length": len(done) - len(before)}
        before = done
        server = start_server(*flags)
    assert 8 <= len(before) < NUM_LINES
    with server.client() as client:
        batch = wait_for(client, batch_id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        found = results(client, batch.output_file_id)
        assert Counter(line["custom_id"] for line in found) == Counter(answers(NUM_LINES).keys())
        assert contents(found) == answers(NUM_LINES)
    assert server.request("GET", f"/v1/requests/{batch_id}/r{NUM_LINES - 1}/explain").status == 200
    again = {f"r{event.seed}" for event in server.stop_and_verify().of(Arrived)}
    assert again == answers(NUM_LINES).keys() - set(before)


def has_grown(folder: Path, before: list[str]) -> bool:
    return len(written(folder)) >= len(before) + 4


def test_people_overtake_a_batch_and_are_not_refused_because_of_it(start_server: StartServer, tmp_path: Path) -> None:
    """There is room for two that run and one that waits, and a batch has filled all of it."""
    flags = ("--model", "fake", "--fake", SLOW, "--batch-dir", str(tmp_path / "batches"))
    server = start_server(*flags, "--max-num-seqs", "2", "--max-queue-len", "1", "--batch-window", "2")
    with server.client() as client, ThreadPoolExecutor(3) as people:
        batch_id = create(client, *lines(6, max_tokens=3000))
        wait_until(lambda: server.figure("vllm:num_requests_running") == 2)
        replies = list(people.map(lambda seed: server.complete(seed=seed).status, (97, 98, 99)))
        assert replies == [200, 200, 200]
        batch = client.batches.retrieve(batch_id)
        assert (batch.status, batch.request_counts.completed) == ("in_progress", 0)
        client.batches.cancel(batch_id)
        batch = wait_for(client, batch_id)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)
    trace = server.stop_and_verify()
    people_came = {event.s for event in trace.of(Arrived) if event.seed in ("97", "98", "99")}
    rest = [event for event in trace.of(Arrived) if event.s not in people_came]
    assert {event.scheduling.priority for event in trace.of(Arrived) if event.s in people_came} == {0}
    assert {event.scheduling.priority for event in rest} == {2**31 - 1}
    assert len(rest) == 2
    # Lines were evicted for people, and for nobody else.
    evictions = [(event.by[0] in people_came, event.reason) for event in trace.of(Preempted)]
    assert evictions
    assert set(evictions) == {(True, "admission")}


def test_beams_count_so_nobody_is_refused_because_of_searches(start_server: StartServer, tmp_path: Path) -> None:
    flags = ("--model", "fake", "--fake", SLOW, "--batch-dir", str(tmp_path / "batches"), "--no-record")
    server = start_server(*flags, "--max-num-seqs", "2", "--max-queue-len", "4", "--batch-window", "4")
    search = {"use_beam_search": True, "n": 1, "max_tokens": 3000}
    searches = [chat_line(f"s{number}", model="fake", beam_width=4, **search) for number in range(6)]
    with server.client() as client, ThreadPoolExecutor(4) as people:
        batch_id = create(client, chat_line("wide", model="fake", beam_width=5, **search), *searches)
        wait_until(lambda: server.figure("vllm:num_requests_running") == 2)
        replies = list(people.map(lambda seed: server.complete(seed=seed).status, range(12)))
        assert replies == [200] * 12
        client.batches.cancel(batch_id)
        batch = wait_for(client, batch_id)
        [refused] = results(client, batch.error_file_id)
        assert refused["custom_id"] == "wide"
        assert "5 sequences at once" in refused["response"]["body"]["error"]["message"]


def test_a_folder_that_cannot_be_used_is_found_before_a_model_is(run_here: RunHere, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, errors = run_here("serve", "no/such/model", "--port", "0", "--batch-dir", "file")
    assert (code, errors.splitlines()) == (
        2,
        ["eventlm: error: cannot make the folder file: File exists; choose another folder with --batch-dir DIR"],
    )


def runners(server: Server, folder: Path) -> list[int]:
    """The front ends that have the runner's lock open."""
    lock = str(folder / "runner.lock")

    def holds(pid: int) -> bool:
        return any(os.readlink(fd) == lock for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())

    return [pid for pid in front_end_pids(server) if holds(pid)]


def test_one_of_several_front_ends_runs_batches_and_another_takes_its_place(
    start_server: StartServer, tmp_path: Path
) -> None:
    folder = tmp_path / "batches"
    flags = ("--model", "fake", "--fake", SLOW, "--batch-dir", str(folder), "--batch-window", "3", "--api-servers", "2")
    server = start_server(*flags)

    batch_ids = []
    for _ in range(4):
        # Each on a connection of its own, so that any front end may get it.
        with server.client(max_retries=5) as client:
            batch_ids.append(create(client, *lines(6)))
    wait_until(lambda: len(written(folder)) >= 4)
    [runner] = runners(server, folder)
    os.kill(runner, signal.SIGKILL)
    for batch_id in batch_ids:
        with server.client(max_retries=5) as client:
            batch = wait_for(client, batch_id)
            assert batch.status == "completed"
            found = results(client, batch.output_file_id)
            assert Counter(line["custom_id"] for line in found) == Counter(answers(6).keys())
            assert contents(found) == answers(6)
    started = [line for line in log_lines(server) if line["event"] == "batches run in this process"]
    assert len(started) == 2
    assert len(runners(server, folder)) == 1
    server.stop_and_verify()
