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


@pytest.mark.parametrize(
    "flags",
    [("--format", "perfetto"), ("--to", "perfetto"), ("--to", "chrome"), ("--to", "otlp"), ("--to", "workload")],
)
def test_formats_of_one_file(flags: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "run"
    assert main(["trace", "export", *flags, "-o", str(output), GOLDEN]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{output}: ")
    assert ("spans\n" in said) == (flags[1] == "otlp")
    begin = {
        "perfetto": b"\x0a",
        "chrome": b'{"displayTimeUnit"',
        "otlp": b'{"resourceSpans"',
        "workload": b'{"t":"workload"',
    }[flags[1]]
    assert output.read_bytes().startswith(begin)
    assert [path.name for path in output.parent.iterdir()] == ["run"]


def test_a_format_and_a_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = ["--from", "40ms", "--to", "60ms"]
    assert main(["trace", "export", "--format", "chrome", *window, "-o", str(tmp_path / "some"), GOLDEN]) == 0
    assert main(["trace", "export", "--to", "chrome", "-o", str(tmp_path / "all"), GOLDEN]) == 0
    assert 0 < (tmp_path / "some").stat().st_size < (tmp_path / "all").stat().st_size


def test_a_format_and_a_time_may_both_be_given_to_the_same_flag(tmp_path: Path) -> None:
    window = ["--from", "0", "--to", "40ms"]
    assert main(["trace", "export", "--to", "otlp", *window, "-o", str(tmp_path / "one"), GOLDEN]) == 0
    assert main(["trace", "export", *window, "--to", "otlp", "-o", str(tmp_path / "two"), GOLDEN]) == 0
    assert main(["trace", "export", "--format", "otlp", *window, "-o", str(tmp_path / "three"), GOLDEN]) == 0
    one, two, three = ((tmp_path / name).read_bytes() for name in ("one", "two", "three"))
    assert one == two == three
    assert one.startswith(b'{"resourceSpans"')


@pytest.mark.parametrize("to", ["perfetto", "chrome", "otlp", "workload"])
@pytest.mark.parametrize("has_segments", [False, True])
def test_the_trace_itself_is_not_replaced(
    to: str, has_segments: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = Path(GOLDEN).read_bytes()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    if has_segments:
        closed = tmp_path / "trace-000000000000.jsonl"
        closed.write_bytes(content)
    (tmp_path / "link").symlink_to(path)
    source = tmp_path if has_segments else path
    before = sorted(tmp_path.iterdir())
    for output in [path, tmp_path / "link", *([closed] if has_segments else [])]:
        assert main(["trace", "export", "--to", to, "-o", str(output), str(source)]) == 2
        assert f"-o {output} would replace what is read from {source}" in capsys.readouterr().err
        assert output.read_bytes() == content
    assert sorted(tmp_path.iterdir()) == before


def test_mistakes_with_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["-o", str(tmp_path / "out"), GOLDEN]
    assert main(["trace", "export", "--to", "speedscope", *output]) == 2
    known = "csv, parquet, perfetto, chrome, otlp, workload"
    assert f"--to speedscope: neither a format ({known}) nor a time" in capsys.readouterr().err
    assert main(["trace", "export", "--to", "chrome", "--format", "otlp", *output]) == 2
    assert "--to chrome and --format otlp: give one format" in capsys.readouterr().err
    assert main(["trace", "export", "--to", "chrome", "--to", "otlp", *output]) == 2
    assert "--to chrome and --to otlp: give one format" in capsys.readouterr().err
    assert main(["trace", "export", "--to", "otlp", "-o", str(tmp_path), GOLDEN]) == 2
    assert f"cannot write to {tmp_path}: it is a folder; name a file with -o" in capsys.readouterr().err
    assert main(["trace", "export", "--format", "chrome", "--to", "99:99", *output]) == 2
    assert "--to 99:99: the run has no times of day" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
