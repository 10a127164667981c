"""`eventlm trace export`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from eventlm.cli.main import main
from eventlm.types import TimeWindow
from tests.replay.golden import FOLDER

GOLDEN = str(FOLDER / "edf_tight.jsonl")


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_it_says_what_it_wrote(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "export", GOLDEN, "--format", to, "-o", str(tmp_path / "out")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/out/requests.{to}: ")
    assert second.startswith(f"{tmp_path}/out/steps.{to}: ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"requests.{to}", f"steps.{to}"]


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "export", GOLDEN, "--format", "xlsx", "-o", str(tmp_path)]) == 2
    assert "known: csv, parquet" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["trace", "export", GOLDEN, "-o", str(tmp_path / "file")]) == 2
    assert f"cannot write to {tmp_path}/file: File exists" in capsys.readouterr().err


def test_a_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def exported(name: str, *window: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        assert main(["trace", "export", GOLDEN, "-o", str(tmp_path / name), *window]) == 0
        return tuple(list(csv.DictReader((tmp_path / name / f"{table}.csv").open())) for table in ("requests", "steps"))  # type: ignore[return-value]

    requests, steps = exported("all")
    middle_ns = int(requests[len(requests) // 2]["arrived_ns"])
    for name, window, found in (
        ("first", ["--to", f"{middle_ns}ns"], TimeWindow(0, middle_ns)),
        ("last", ["--from", f"{middle_ns}ns"], TimeWindow(middle_ns, None)),
    ):
        some_requests, some_steps = exported(name, *window)
        assert some_requests == [row for row in requests if found.has(int(row["arrived_ns"]))]
        spans = [(int(row["completed_ns"]) - int(row["execution_ns"]), int(row["completed_ns"])) for row in steps]
        assert some_steps == [row for row, span in zip(steps, spans, strict=True) if found.overlaps(*span)]
        assert 0 < len(some_requests) < len(requests)
