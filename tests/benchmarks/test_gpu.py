"""The GPU benchmark: whatever a section does is a row, and every section runs on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_harness import process
from benchmarks.gpu_harness import report as gpu_report
from benchmarks.gpu_harness.process import Limits, run_section
from benchmarks.gpu_harness.row import Context, Row, check, cost, speed
from benchmarks.gpu_harness.section import Section
from benchmarks.gpu_sections import SECTIONS, sanitizer

ROOT = Path(__file__).parents[2]
MISBEHAVING = Section("odd", 10)
#: So much for all slow sections, and for all quick ones, which take a minute or two where nothing else is done.
SMOKE_SECONDS = 600
QUICK_SECONDS = 1500
QUICK = ("ceilings", "kernels", "torch_compile", "sanitizer")
SLOW = tuple(section.name for section in SECTIONS if section.name not in QUICK)


def find(folder: Path, *, smoke: bool = False, skip: Sequence[str] = ()) -> list[Row]:
    """The rows of the section that misbehaves."""
    module = "tests.benchmarks.misbehaving_section"
    context = Context(module=module, smoke=smoke, folder=str(folder), seconds=60, skip=list(skip))
    return list(run_section(MISBEHAVING, context, Limits(section=240, part=4)))


def test_whatever_a_part_does_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It starts no worker that would have to give memory back.
    monkeypatch.setattr(process, "ORPHAN_SECONDS", 0)
    rows = find(tmp_path)
    assert {row.section for row in rows} == {"odd"}
    assert [(row.what, row.outcome, row.note) for row in rows] == [
        ("well", "missed", ""),
        ("before the error", "measured", ""),
        ("error", "failed", "ValueError: so it goes"),
        ("section error", "failed", "no ground"),
        ("skip", "skipped", "no tool"),
        ("lost", "failed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("lost by Triton", "failed", "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"),
        ("well", "missed", ""),
        ("crash", "failed", "the process died (killed by SIGSEGV)"),
        ("hang", "failed", "not done after 4 s"),
        ("wrong", "failed", ""),
    ]


def test_in_a_smoke_run_only_what_is_wrong_counts(tmp_path: Path) -> None:
    rows = find(
        tmp_path, smoke=True, skip=["error", "section error", "skip", "lost", "lost by Triton", "crash", "hang"]
    )
    assert [(row.what, row.outcome) for row in rows] == [
        ("well", "measured"),
        ("well", "measured"),
        ("wrong", "failed"),
    ]


def test_time_is_shared_and_what_is_left_goes_on() -> None:
    first, second = Section("a", 10), Section("b", 30)
    assert gpu.plan([first, second], 400) == 100
    assert gpu.plan([second], 390) == 390


def test_sections_bring_what_they_need() -> None:
    assert [section.name for section in gpu.choose("kernels")] == ["ceilings", "kernels"]
    assert [section.name for section in gpu.choose("ceilings")] == ["ceilings"]
    with pytest.raises(ValueError, match="there is no section 'kernel'; there are ceilings, kernels"):
        gpu.choose("ceilings,kernel")


@pytest.mark.parametrize(
    ("row", "outcome", "line"),
    [
        (speed("a", 3, "TB/s", limit=4, limit_name="copy", target=0.75), "met", "0.75 of 4 TB/s copy"),
        (speed("a", 2, "TB/s", limit=4, limit_name="copy", target=0.75), "missed", "target >= 0.75"),
        (speed("a", 2, "TB/s"), "measured", "a: 2 TB/s: measured"),
        (cost("a", 0.03, "", at_most=0.02), "missed", "0.03, target <= 0.02"),
        (check("a", float("nan"), "", at_most=1), "failed", "a: nan"),
        (check("a", 0.5, "", at_least=0.9), "failed", "target >= 0.9"),
    ],
)
def test_rows_are_judged(row: Row, outcome: str, line: str) -> None:
    assert row.outcome == outcome
    assert line in gpu_report.one_line(row)


def test_a_report_comes_back_and_is_rendered(tmp_path: Path) -> None:
    rows = [speed("a|b", 1234.5, "tok/s", limit=2469, limit_name="peer", target=0.9), check("c", 0.1, "", at_most=0.2)]
    report = gpu_report.Report(smoke=False, versions={"torch": "2.11"}, seconds=3.0, rows=rows)
    path = tmp_path / "gpu.json"
    path.write_bytes(gpu_report.encode(report))
    assert gpu_report.read(path) == report
    lines = list(gpu_report.render_markdown(report))
    assert "|  | a\\|b | 1,234 tok/s | 2,469 tok/s peer | 0.5 | >= 0.9 | missed |  |" in lines
    assert len({line.replace("\\|", "").count("|") for line in lines[2:]}) == 1
    assert len(list(gpu_report.render(rows))) == 3


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "--smoke" in capsys.readouterr().err


def smoke(folder: Path, names: Sequence[str], *options: str) -> gpu_report.Report:
    """Of these sections, as a user runs them."""
    out = folder / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--smoke", "--sections", ",".join(names), "--out", str(out)]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stderr
    return gpu_report.read(out)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> gpu_report.Report:
    """Of those that start an engine once, or none."""
    return smoke(tmp_path_factory.mktemp("gpu"), QUICK, "--budget", str(QUICK_SECONDS))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> gpu_report.Report:
    """Of the others, which take minutes."""
    return smoke(tmp_path_factory.mktemp("gpu"), SLOW)


@pytest.mark.timeout(QUICK_SECONDS + 60)
@pytest.mark.parametrize("name", QUICK)
def test_every_quick_section_runs_on_the_cpu(quick: gpu_report.Report, name: str) -> None:
    check_section(quick, name)


@pytest.mark.soak
@pytest.mark.timeout(SMOKE_SECONDS)
@pytest.mark.parametrize("name", SLOW)
def test_every_slow_section_runs_on_the_cpu(slow: gpu_report.Report, name: str) -> None:
    check_section(slow, name)


def check_section(report: gpu_report.Report, name: str) -> None:
    """It has rows, and none has failed."""
    rows = [row for row in report.rows if row.section == name]
    assert rows
    assert [row for row in rows if row.outcome == "failed"] == []


def test_the_sanitizer_is_found_in_a_toolkit_off_the_path(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / sanitizer.TOOL
    tool.parent.mkdir()
    tool.touch(mode=0o755)
    assert sanitizer.find_tool({"PATH": "/nowhere", "CUDA_HOME": str(tmp_path)}) == str(tool)
    assert sanitizer.find_tool({"PATH": str(tool.parent)}) == str(tool)
