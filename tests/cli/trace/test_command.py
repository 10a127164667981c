"""`eventlm trace` and `eventlm pull` over what they call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventlm.cli.main import main
from eventlm.events import PluginRecord
from eventlm.models.fetch import pull as pull_module
from tests.bus.traces import events, header, lines
from tests.replay.backend_runs import record_backends

NUM_EVENTS = 40


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines(events(NUM_EVENTS))))
    return path


def test_check_of_a_whole_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "check", str(trace)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{trace}: ok, {NUM_EVENTS} events, {trace.stat().st_size:,} bytes, a clean end\n"
    assert captured.err == ""


def test_damage_is_exit_code_3(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(trace.read_bytes())
    content[len(content) // 2] ^= 1
    trace.write_bytes(content)
    for action in ("check", "info", "repair"):
        assert main(["trace", action, str(trace)]) == 3
        assert "is damaged at line " in capsys.readouterr().err


def test_a_torn_trace_is_a_warning_or_exit_code_4_and_can_be_repaired(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trace.read_bytes()
    trace.write_bytes(whole[:-5])
    assert main(["trace", "check", str(trace)]) == 0
    captured = capsys.readouterr()
    assert "a torn last line" in captured.out
    assert captured.err.startswith("eventlm: warning: ")
    assert main(["trace", "check", "--strict", str(trace)]) == 4
    assert main(["trace", "info", "--strict", str(trace)]) == 4
    capsys.readouterr()
    assert main(["trace", "repair", str(trace)]) == 0
    assert f"the file as it was is {trace}.broken" in capsys.readouterr().out
    assert whole.startswith(trace.read_bytes())
    assert main(["trace", "repair", str(trace)]) == 0
    assert "nothing to repair" in capsys.readouterr().out


def test_info_describes_the_run(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", str(trace)]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["run"].strip().startswith(f"{header().run}, started 2025-01-01T00:00:00+00:00, ")
    assert f"{NUM_EVENTS}: " in rows["events"]
    assert "rejected" in rows["requests"]


def test_info_counts_in_words_and_shows_the_plug_ins_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    parameters = {"multiplier": 2, "min_deadline_ms": 300}
    plugins = [
        PluginRecord(kind="policy", name="edf", reference="m:Edf", parameters=parameters),
        PluginRecord(kind="batcher", name="fixed", reference="m:Fixed"),
        PluginRecord(kind="router", name="pull", reference="m:Pull"),
    ]
    path.write_bytes(b"".join(lines([header(plugins=plugins), *events(1200, end=False)[1:]])))
    assert main(["trace", "info", str(path)]) == 0
    output = capsys.readouterr().out
    rows = {line[:10].strip(): line[12:] for line in output.splitlines()}
    assert rows["plug-ins"] == "policy edf:multiplier=2,min_deadline_ms=300, batcher fixed, router pull"
    assert rows["events"].startswith("1,200: ")
    assert rows["events"].endswith(" decisions, 1 marker")
    assert rows["trace"] == f"{path}, {path.stat().st_size:,} bytes, no clean end"


def test_a_folder_stands_for_its_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("info", "check", "repair"):
        assert main(["trace", action, str(trace.parent)]) == 0
        assert str(trace) in capsys.readouterr().out
    trace.unlink()
    for action in ("info", "check", "repair"):
        assert main(["trace", action, str(trace.parent)]) == 2
        assert "holds no trace.jsonl; name the folder of a run" in capsys.readouterr().err


def test_info_as_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", "--json", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["check"]["num_events"] == NUM_EVENTS
    assert found["header"]["run"] == header().run


def test_a_trace_of_another_version_is_exit_code_13(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines([header(format=99)])))
    assert main(["trace", "info", str(path)]) == 13


def test_pull_prints_the_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_module, "pull", lambda name: tmp_path / name)
    assert main(["pull"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/smollm2\n"


def test_an_unknown_model_cannot_be_pulled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "gpt5"]) == 2
    assert "no model is known as 'gpt5' (known: smollm2, smollm2:bf16, or" in capsys.readouterr().err


def test_the_numbers_of_a_run_of_backends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", str(record_backends(tmp_path, 9))]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if line[:1].isalpha())
    assert rows["backends"] == "up to 3, each taken to cache 200 blocks of 4 tokens"
    assert rows["attempts"].startswith("37 at backends, ")
    assert "steps" not in rows
    assert "replicas" not in rows
