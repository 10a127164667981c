"""`eventlm batch run` as a process: results, errors, interruptions, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pexpect
import pytest

from eventlm.events import Arrived
from tests.cli.conftest import RunHere
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.server.batches.input_files import chat_line, contents, jsonl
from tests.serving import command, fake_text, run_command, verified

NUM_TOKENS = 6


def line(seed: int, **fields: Any) -> dict[str, Any]:
    return chat_line(f"r{seed}", **{"model": "fake", "seed": seed, "max_tokens": NUM_TOKENS} | fields)


def write(folder: Path, *lines: Any, name: str = "in.jsonl") -> None:
    (folder / name).write_bytes(jsonl(*lines))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_bytes().splitlines()]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_command("batch", "run", "in.jsonl", "-o", "out.jsonl", "--model", "fake", *flags, cwd=folder)


def test_each_line_gets_a_line(tmp_path: Path) -> None:
    write(tmp_path, *(line(seed) for seed in range(50)))
    done = run(tmp_path, "--record", "runs", "--max-num-seqs", "4", "--max-queue-len", "2")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[-1] == "eventlm: 50 requests done, 0 failed, of 50"
    found = read(tmp_path / "out.jsonl")
    assert contents(found) == {f"r{seed}": fake_text(seed, NUM_TOKENS) for seed in range(50)}
    assert {tuple(each) for each in found} == {("id", "custom_id", "response", "error")}
    assert {each["id"] for each in found} == {f"batch_req_{number}" for number in range(1, 51)}
    trace = verified(tmp_path / "runs" / "latest" / "trace.jsonl")
    assert trace.result.clean_end
    assert [event.scheduling.offline for event in trace.of(Arrived)] == [True] * 50


def test_lines_that_fail_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    embedding = {"model": "fake", "input": "hi"}
    lines: list[Any] = [line(seed) for seed in range(200)]
    lines[99] = b"{"
    lines.append({"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": embedding})
    lines.append(
        {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": embedding | {"max_output_tokens": 8}}
    )
    lines.append({"custom_id": "m", "method": "POST", "url": "/v1/embeddings", "body": embedding | {"model": "x"}})
    write(tmp_path, *lines)
    done = run(tmp_path, "--errors", "errors.jsonl")
    assert done.returncode == 1
    summary, first, where = done.stderr.splitlines()
    assert summary == "eventlm: 201 requests done, 2 failed, of 203"
    assert first.startswith("eventlm: the first error: Line 100: it is not valid JSON")
    assert where == "eventlm: all errors are in errors.jsonl"
    assert len(read(tmp_path / "out.jsonl")) == 201
    bad, unknown = sorted(read(tmp_path / "errors.jsonl"), key=lambda each: each["error"] is None)
    assert (bad["error"]["line"], bad["error"]["code"], bad["response"]) == (100, "invalid_json_line", None)
    assert (unknown["custom_id"], unknown["response"]["status_code"]) == ("m", 404)


def test_why_requests_fail_is_said_and_resume_does_not_run_them_again(tmp_path: Path) -> None:
    write(tmp_path, line(0), line(1, model="nope"))
    done = run(tmp_path)
    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        [
            "eventlm: 1 request done, 1 failed, of 2",
            "eventlm: the first error: Line 2: The model 'nope' does not exist; GET /v1/models lists those that do.",
            "eventlm: all errors are in out.jsonl",
        ],
    )
    write(tmp_path, line(0), line(1, model="nope"), line(2))
    again = run(tmp_path, "--resume")
    assert (again.returncode, again.stderr.splitlines()) == (
        1,
        [
            "eventlm: 2 requests done, 1 failed, of 3",
            "eventlm: 1 request that failed before was not run again",
            "eventlm: all errors are in out.jsonl",
        ],
    )


def test_an_interruption_keeps_what_is_done_and_resume_does_the_rest(tmp_path: Path) -> None:
    write(tmp_path, *(line(seed) for seed in range(30)))
    flags = ["batch", "run", "in.jsonl", "-o", "out.jsonl", "--model", "fake", "--fake", "base_ns=10000000"]
    flags += ["--max-num-seqs", "2", "--record", "runs"]
    process = subprocess.Popen(command(*flags), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    output = tmp_path / "out.jsonl"
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    kept = output.read_bytes()
    done = {each["custom_id"] for each in read(output)}
    assert errors == f"eventlm: {len(done)} requests done, 0 failed, of 30\n"
    assert 5 <= len(done) < 30
    # What a crash may leave.
    output.write_bytes(kept + b'{"id": "batch_req_6')
    again = run(tmp_path, "--resume", "--record", "runs")
    assert (again.returncode, again.stderr.splitlines()[-1]) == (0, "eventlm: 30 requests done, 0 failed, of 30")
    found = read(output)
    assert output.read_bytes().startswith(kept)
    assert Counter(each["custom_id"] for each in found) == Counter(f"r{seed}" for seed in range(30))
    trace = verified(tmp_path / "runs" / "latest" / "trace.jsonl")
    assert {f"r{event.seed}" for event in trace.of(Arrived)} == {f"r{seed}" for seed in range(30)} - done
    # Nothing is left to do, so no model is loaded.
    assert run(tmp_path, "--resume", "--model", "no/such/model").returncode == 0


def test_a_terminal_shows_how_far_it_is(tmp_path: Path) -> None:
    write(tmp_path, *(line(seed) for seed in range(30)))
    program, *flags = command("batch", "run", "in.jsonl", "-o", "out.jsonl", "--model", "fake", "--max-num-seqs", "1")
    shown = pexpect.spawn(program, [*flags, "--fake", "base_ns=10000000"], cwd=str(tmp_path), dimensions=(24, 100))
    shown.expect(r"requests: .*/30 ", timeout=PATIENCE_SECONDS)
    shown.expect("eventlm: 30 requests done, 0 failed, of 30", timeout=PATIENCE_SECONDS)
    shown.expect(pexpect.EOF)
    shown.close()
    assert shown.exitstatus == 0


#: Files, flags and words of the error.
MISTAKES: list[tuple[dict[str, bytes], list[str], str]] = [
    ({}, ["in.jsonl", "-o", "out.jsonl"], "cannot read in.jsonl: it is no file"),
    ({"in.jsonl": b""}, ["in.jsonl", "-o", "out.jsonl"], "no line of in.jsonl can be run: it is empty"),
    (
        {"in.jsonl": b"hi\n"},
        ["in.jsonl", "-o", "out.jsonl"],
        "no line of in.jsonl can be run: Line 1: it is not valid JSON",
    ),
    (
        {"in.jsonl": jsonl(line(1)), "out.jsonl": b""},
        ["in.jsonl", "-o", "out.jsonl"],
        "out.jsonl exists: give --resume",
    ),
    ({"in.jsonl": jsonl(line(1))}, ["in.jsonl", "-o", "no/out.jsonl"], "there is no folder no"),
    ({"in.jsonl": jsonl(line(1))}, ["in.jsonl", "-o", "in.jsonl", "--resume"], "in.jsonl is the input"),
    (
        {"in.jsonl": jsonl(line(1)), "out.jsonl": jsonl({"a": 1})},
        ["in.jsonl", "-o", "out.jsonl", "--resume"],
        "cannot resume out.jsonl: it is no output of a batch",
    ),
    (
        {"in.jsonl": jsonl(line(1)), "out.jsonl": jsonl({"id": "batch_req_1", "custom_id": "other"})},
        ["in.jsonl", "-o", "out.jsonl", "--resume"],
        "line 1 of in.jsonl is not the one that the results have",
    ),
    ({"in.jsonl": jsonl(line(1))}, ["in.jsonl"], "the following arguments are required"),
]


@pytest.mark.parametrize(("files", "flags", "words"), MISTAKES)
def test_mistakes(run_here: RunHere, tmp_path: Path, files: dict[str, bytes], flags: list[str], words: str) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    code, output, errors = run_here("batch", "run", *flags, "--model", "fake")
    assert (code, output) == (2, "")
    assert words in errors
    assert len(errors.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
