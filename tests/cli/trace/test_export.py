"""`eventlm trace export`."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.cli.main import main
from tests.replay.golden import FOLDER

GOLDEN = str(FOLDER / "edf_tight.jsonl")


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_it_says_what_it_wrote(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "export", GOLDEN, "--to", to, "-o", str(tmp_path / "out")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/out/requests.{to}: ")
    assert second.startswith(f"{tmp_path}/out/steps.{to}: ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"requests.{to}", f"steps.{to}"]


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "export", GOLDEN, "-o", str(tmp_path)]) == 2
    assert "--to" in capsys.readouterr().err
    assert main(["trace", "export", GOLDEN, "--to", "xlsx", "-o", str(tmp_path)]) == 2
    assert "known: csv, parquet" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["trace", "export", GOLDEN, "--to", "csv", "-o", str(tmp_path / "file")]) == 2
    assert f"cannot write to {tmp_path}/file: File exists" in capsys.readouterr().err
