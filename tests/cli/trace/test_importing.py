"""`eventlm trace import`: the summary and the flags."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.cli.main import main
from eventlm.cli.trace.importing import SOURCES
from eventlm.replay.workload import import_formats as trace_import_formats
from tests.replay.workload.test_importer import SAMPLES


def test_the_flag_knows_every_format() -> None:
    assert list(SOURCES) == list(trace_import_formats.SOURCES)


def test_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "w.jsonl")
    assert main(["trace", "import", "--from", "bailian", str(SAMPLES / "bailian.jsonl"), "-o", output]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.replace("left out", "left_out").splitlines())
    assert rows["requests"] == "5 in 38.086 s, 0.13 a second"
    assert rows["left_out"] == "1 without output (failed)"
    assert rows["prompts"] == "mean 42, p50 33, p99 81, max 81 tokens"
    assert rows["blocks"] == "16 of 16 tokens, 11 distinct; the last of a prompt may be partial"
    assert rows["sessions"] == "1 with 2 later turns, named by the trace"


def test_as_json_and_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["trace", "import", "--from", "burstgpt", str(SAMPLES / "burstgpt.csv"), "-o", str(tmp_path / "w")]
    assert main([*arguments, "--json", "--start", "7s", "--duration", "1min"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_requests"], found["source"]) == (4, "burstgpt")
    assert main([*arguments, "--start", "7"]) == 2
    assert "--start 7: not a time" in capsys.readouterr().err
    assert main([*arguments, "--start", "9h"]) == 2
    assert "is left: 7 outside the requested part" in capsys.readouterr().err


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = str(SAMPLES / "azure.csv")
    assert main(["trace", "import", sample, "-o", str(tmp_path / "w")]) == 2
    assert "--from" in capsys.readouterr().err
    assert main(["trace", "import", sample, "--from", "azur", "-o", str(tmp_path / "w")]) == 2
    assert "did you mean azure?" in capsys.readouterr().err
    assert main(["trace", "import", sample, "--from", "vidur", "-o", str(tmp_path / "w")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "--from azure" in captured.err
    assert main(["trace", "import", sample, "--from", "azure", "-o", "-"]) == 2
    assert "-o -: a workload is written to a file" in capsys.readouterr().err


def test_from_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eventlm", "trace", "import", "--from", "azure", "-", "-o", str(tmp_path / "w")]
    done = subprocess.run(command, input=(SAMPLES / "azure.csv").read_bytes(), capture_output=True, check=True)
    assert b"requests  4 in" in done.stdout
