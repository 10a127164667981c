"""`eventlm replay --execute` as a user runs it, on runs of real servers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bus import token_logs
from tests.cli.conftest import RunHere, StartServer
from tests.replay.executions import record_with_tokens
from tests.replay.traces import CALM, small_machine, tampered
from tests.serving import command

CANARY = "canary-51b7d0"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    machine = small_machine({"type": "fcfs"})
    return record_with_tokens(tmp_path_factory.mktemp("calm"), 1, machine=machine, chaos=CALM, num_requests=6)


@pytest.fixture
def run(calm: Path, tmp_path: Path) -> Path:
    """A copy to meddle with."""
    return Path(shutil.copytree(calm, tmp_path / "run"))


def test_a_killed_server_recorded_no_text_and_lost_no_token(start_server: StartServer) -> None:
    flags = ("--record-tokens", "--record-segment", "8KiB", "--replicas", "2")
    server = start_server("--model", "fake", *flags, environment={"EVENTLM_API_KEY": f"{CANARY}-key"})
    client = server.client(api_key=f"{CANARY}-key")
    salted: dict[str, Any] = {"extra_body": {"cache_salt": f"{CANARY}-salt", "priority": 1}, "user": f"{CANARY}-user"}
    for _ in range(6):
        client.completions.create(
            model="fake", prompt=[f"{CANARY} {index}" for index in range(6)], max_tokens=30, stop=CANARY, **salted
        )
    with client.completions.create(model="fake", prompt=CANARY, max_tokens=400, stream=True, **salted) as stream:
        next(iter(stream))
        server.stop(number=signal.SIGKILL)
    folder = server.trace.parent
    names = sorted(os.listdir(folder))
    assert len(names) >= 6
    assert {name.replace("trace", "tokens") for name in names} == {name for name in names if "tokens" in name}
    for name in names:
        # Token ids of the prompts there are, but nothing else of a request, and no secret.
        assert CANARY not in (folder / name).read_text()
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    prompt_ids = json.dumps(list(CANARY.encode()), separators=(",", ":"))[1:-1]
    is_told = {name: prompt_ids in (folder / name).read_text() for name in names}
    assert not any(is_told[name] for name in names if "trace" in name)
    assert any(is_told.values())
    assert token_logs.facts_without_tokens(folder) == []
    done = subprocess.run(command("replay", str(folder), "--execute"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " re-executed, identical (37 requests)" in done.stdout
    assert "its engine was killed or replaced after event" in done.stderr


def test_a_mismatch_has_its_place_and_its_code(run: Path, run_here: RunHere) -> None:
    tampered(
        run / "trace.jsonl",
        run / "trace.jsonl",
        lambda objects: objects[0]["config"]["model"]["fake"].update(piece_ppm=300_000),
    )
    code, output, _ = run_here("replay", str(run), "--execute")
    assert code == 10
    assert ": token at event " in output
    assert " before it came out as recorded\n" in output
    assert "remedy    use the host" in output
    code, output, _ = run_here("replay", str(run), "--execute", "--teacher-force")
    assert code == 10
    assert "more; --json has all" in output
    told = json.loads(run_here("replay", str(run), "--execute", "--teacher-force", "--json")[1])
    assert (told["exit_code"], told["is_teacher_forced"], told["tokens_checked"]) == (10, True, True)
    assert told["num_mismatches"] == len(told["mismatches"]) > 10
    assert {mismatch["code"] for mismatch in told["mismatches"]} == {"token"}


def test_what_was_compared_by_digest_is_reported(run: Path, run_here: RunHere) -> None:
    def without_outputs(lines: list[dict[str, Any]]) -> None:
        lines[:] = [line for line in lines if line["t"] != "outputs"]

    token_logs.tamper(run / "tokens.jsonl", without_outputs)
    code, output, _ = run_here("replay", str(run), "--execute")
    assert code == 0
    assert "steps compared by digest: their tokens in the token log are missing or damaged" in output
    assert "host, software or threads are not those of the recorded run; results may differ there" in output


def test_check_reports_the_token_ids_too(run: Path, run_here: RunHere) -> None:
    code, output, errors = run_here("trace", "check", str(run))
    assert (code, errors) == (0, "")
    assert output.splitlines()[1].startswith("token ids beside it: ok, 6 prompts, ")
    path = run / "tokens.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"tokens":[', b'"tokens": [', 1))
    code, output, errors = run_here("trace", "check", str(run))
    assert (code, output.count("\n")) == (3, 1)
    assert f"warning: {path} is damaged at line " in errors
    assert "the token ids beside the trace are damaged: 1 event without a sound line; the trace itself" in errors
    path.unlink()
    code, output, errors = run_here("trace", "check", str(run))
    assert (code, output.count("\n")) == (0, 1)
    assert "warning: the token log of " in errors


def test_mistakes(run: Path, run_here: RunHere) -> None:
    trace = str(run / "trace.jsonl")
    for flags, message in (
        (("--teacher-force",), "--teacher-force needs --execute"),
        (("--model", "fake"), "--model needs --execute"),
        (("--execute", "--threads", "0"), "--threads 0: 1 to 1024 are possible"),
        (("--execute", "--threads", "100000"), "--threads 100000: 1 to 1024 are possible"),
        (("--execute", "--verify"), "--execute runs what was recorded as it was"),
        (("--execute", "--policy", "edf"), "--execute runs what was recorded as it was"),
        (("--execute", "--model", "smollm"), "--model smollm: no such folder"),
    ):
        code, _, errors = run_here("replay", trace, *flags)
        assert code in (1, 2)
        assert message in errors
    (run / "tokens.jsonl").unlink()
    code, _, errors = run_here("replay", trace, "--execute")
    assert code == 2
    assert "the token log of" in errors
    assert "--record-tokens" in errors


def test_a_missing_model_is_reported(run: Path, run_here: RunHere) -> None:
    def elsewhere(objects: list[dict[str, Any]]) -> None:
        objects[0]["config"]["model"] = {"model": "/gone"}

    tampered(run / "trace.jsonl", run / "trace.jsonl", elsewhere)
    code, _, errors = run_here("replay", str(run), "--execute")
    assert code == 2
    assert "the trace names a model that is not there: --model /gone: no such folder" in errors
    assert errors.rstrip().endswith("; give it with --model")


@pytest.mark.parametrize(
    ("model", "command"),
    [
        ({"model": "smollm2"}, "`eventlm pull smollm2`"),
        ({"model": "acme/tiny", "revision": "v1"}, "`eventlm pull acme/tiny --revision v1`"),
    ],
)
def test_nothing_is_fetched_because_a_trace_names_it(
    run: Path, run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, str], command: str
) -> None:
    tampered(run / "trace.jsonl", run / "trace.jsonl", lambda objects: objects[0]["config"].update(model=model))
    for name in ("EVENTLM_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    code, _, errors = run_here("replay", str(run), "--execute")
    assert code == 1
    assert errors.startswith("eventlm: error: the trace names a model that is not in the cache: ")
    assert f"; {command} fetches it, or give it with --model" in errors


def test_tokens_are_recorded_only_beside_a_trace(run_here: RunHere) -> None:
    code, _, errors = run_here("generate", "hi", "--model", "fake", "--record-tokens")
    assert code == 2
    assert "--record-tokens writes a file beside the trace, and nothing is recorded; add --record DIR" in errors
