"""Reports as files: their size and policy, parts of runs, and what a server makes of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import TraceCorruptError, UsageError
from eventlm.look.report.build import build_report, make_report
from eventlm.replay.verify.divergence_error import DivergenceError
from eventlm.types import TimeWindow
from tests.look.report.runs import GOLDEN, HOSTILE, write_empty, write_hostile
from tests.replay.golden import BROKEN, FOLDER
from tests.replay.workload_runs import record


def data_of(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_page_loads_nothing_and_runs_nothing_else() -> None:
    html = make_report(str(GOLDEN)).html
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy.startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert len(html) < 300_000


def test_hostile_texts_stay_in_the_data(tmp_path: Path) -> None:
    html = make_report(str(write_hostile(tmp_path / "run.jsonl")), verify=False).html
    assert html.count("<script") == 2
    assert html.count("</script>") == 2
    text = json.dumps(data_of(html), ensure_ascii=False)
    for each in HOSTILE:
        assert json.dumps(each, ensure_ascii=False)[1:-1] in text


def test_runs_that_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="--no-verify"):
        make_report(str(FOLDER / f"{BROKEN}.jsonl"))
    assert make_report(str(FOLDER / f"{BROKEN}.jsonl"), verify=False).warnings
    lines = GOLDEN.read_bytes().splitlines(keepends=True)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(b"".join([*lines[:60], b"{}\n", *lines[61:]]))
    with pytest.raises(TraceCorruptError, match="line 61"):
        make_report(str(damaged))
    partial = make_report(str(damaged), partial=True)
    assert any("line 61" in warning for warning in partial.warnings)
    with pytest.raises(TraceCorruptError, match="line 61"):
        make_report(str(GOLDEN), other=str(damaged))
    for options in ({"partial": True}, {"window": TimeWindow(0, None)}):
        with pytest.raises(UsageError, match="leave out TRACE_B"):
            make_report(str(GOLDEN), other=str(GOLDEN), **options)
    with pytest.raises(UsageError, match="--policy needs a whole trace"):
        make_report(str(damaged), partial=True, policies=[{"type": "edf"}])


def test_an_empty_run(tmp_path: Path) -> None:
    data = data_of(make_report(str(write_empty(tmp_path / "run.jsonl"))).html)
    assert (data["findings"], data["timeline"]["names"], data["percentiles"], data["worst"]) == ([], [], [], [])


def test_a_window(planted_run: Callable[[str], Path]) -> None:
    window = TimeWindow(3_000_000_000, 5_000_000_000)
    data = data_of(make_report(str(planted_run("starving_key")), window=window, trust_local_plugins=True).html)
    assert data["end"] == 2_000_000_000
    assert 50 < len(data["timeline"]["names"]) < 150
    assert any("Times count from 3 s" in notice["text"] for notice in data["notices"])
    assert data["findings"][0]["kind"] == "starvation"


def test_the_report_of_a_server(tmp_path: Path) -> None:
    """Of many files the last is enough, if it begins before the window."""
    record(tmp_path, 5)
    run = tmp_path / "seed-5"
    names = data_of(build_report(run, TimeWindow(0, None)))["timeline"]["names"]
    last_ns = int(json.loads((run / "trace.jsonl").read_bytes().split(b"\n")[-2])["ts"])
    few = data_of(build_report(run, TimeWindow(last_ns - 1, None)))["timeline"]["names"]
    assert len(few) < len(names)
