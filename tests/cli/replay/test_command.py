"""`eventlm replay` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.cli.main import main
from eventlm.events.codec import DECISION_TAGS
from tests.replay.traces import read_objects, record, small_machine, tampered

LOCAL = """
from eventlm.core.plugin import Policy

class Newest(Policy, frozen=True, kw_only=True):
    def keys(self, sequences, now_ns):
        return [-s.request for s in sequences]
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs"), small_machine({"type": "fcfs"}))


def eventlm(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eventlm", "replay", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_verifies(trace: Path, tmp_path: Path) -> None:
    done = eventlm(trace, cwd=tmp_path)
    objects = read_objects(trace)
    num_decisions = sum(item["t"] in DECISION_TAGS for item in objects)
    summary = f"{len(objects):,} events, {num_decisions:,} decisions verified, tokens not checked"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(summary)
    assert done.stdout.count("\n") == 1


def test_a_folder_stands_for_its_trace(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parents[1])
    assert main(["replay", "latest"]) == 0
    assert main(["replay", str(trace.parent)]) == 0
    capsys.readouterr()
    assert main(["replay", "."]) == 2
    assert "the folder . holds no trace.jsonl; the newest run in it is latest" in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 2
    assert "name the folder of a run" in capsys.readouterr().err
    assert main(["replay", "nothing-here"]) == 2
    assert "cannot read the trace nothing-here" in capsys.readouterr().err


def test_left_out_it_is_the_newest_run_of_the_state_folder(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENTLM_STATE", str(tmp_path / "state"))
    assert main(["replay"]) == 2
    assert f"no run is recorded in {tmp_path}/state/runs; give the path of a trace" in capsys.readouterr().err
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "runs").symlink_to(trace.parents[1])
    assert main(["replay"]) == 0
    assert main(["trace", "check", "latest"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{trace}: ok, ")
    assert main(["replay", trace.parent.name]) == 0
    assert main(["replay", f"{trace.parent.name}x"]) == 2
    # What lies here under that name goes first.
    (tmp_path / "latest").write_text("")
    assert main(["replay", "latest"]) == 3


def test_a_change_is_reported_at_the_first_decision_it_alters(trace: Path, tmp_path: Path) -> None:
    done = eventlm(trace, "--verify", "--set", "max_num_batched_tokens=8", cwd=tmp_path)
    assert done.returncode == 10
    assert "config_drift at event " in done.stdout
    assert "differs   chunks" in done.stdout or "differs   num_tokens" in done.stdout
    assert '{"t":"arrive"' in done.stdout
    assert "Traceback" not in done.stderr


def test_an_unknown_change_is_a_usage_error(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--verify", "--policy", "edff"]) == 2
    assert "did you mean edf?" in capsys.readouterr().err


def test_json_is_one_object_for_both_outcomes(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--json"]) == 0
    clean = json.loads(capsys.readouterr().out)
    assert clean["divergence"] is None
    assert clean["num_events"] == len(read_objects(trace))
    assert main(["replay", str(trace), "--json", "--verify", "--batcher", "fixed:max_chunk_tokens=1"]) == 10
    assert json.loads(capsys.readouterr().out)["divergence"]["code"] == "policy_drift"


def test_a_killed_run_is_a_warning(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tampered(trace, tmp_path / "t", lambda objects: objects.pop())
    assert main(["replay", str(path)]) == 0
    captured = capsys.readouterr()
    assert "decisions verified, tokens not checked" in captured.out
    assert captured.err.startswith("eventlm: warning: ")
    assert "no clean end" in captured.err


def test_damage_and_tears_have_their_codes(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = trace.read_bytes()
    path = tmp_path / "t"
    path.write_bytes(content[:-3])
    assert main(["replay", str(path)]) == 0
    assert main(["replay", str(path), "--strict"]) == 4
    path.write_bytes(content.replace(b'"t":"emit"', b'"t":"Emit"', 1))
    assert main(["replay", str(path)]) == 3
    assert "is damaged at line" in capsys.readouterr().err


def test_local_plugins_are_imported_only_if_trusted(tmp_path: Path) -> None:
    (tmp_path / "newest.py").write_text(LOCAL)
    script = (
        "from pathlib import Path; from tests.replay.traces import record, small_machine; "
        "record(Path('runs'), small_machine({'type': 'newest:Newest'}))"
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[3]}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    refused = eventlm("runs/latest", cwd=tmp_path)
    assert refused.returncode == 2
    assert "without importing that code; if you trust it, use --trust-local-plugins" in refused.stderr
    assert eventlm("runs/latest", "--trust-local-plugins", cwd=tmp_path).returncode == 0
