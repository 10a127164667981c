"""The table as it stands, line by line, and the JSON as programs read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from eventlm.config.objectives import Objectives
from eventlm.replay.rebuild import Changes
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.report import MAX_WIDTH, render, render_json
from eventlm.replay.what_if.what_if import WhatIfResult, what_if
from tests.replay.made_workloads import COST
from tests.replay.what_if_runs import made_run, policy, requests_of, run_of, slower

#: To write it anew: `python -m tests.replay.what_if.test_report`.
GOLDEN = Path(__file__).parents[1] / "golden" / "what_if.txt"
ALTERNATIVES = [
    policy("edf"),
    policy("lrs"),
    Alternative(num_replicas=2),
    Alternative(changes=Changes(settings={"num_blocks": 40})),
]


def ask(folder: Path, alternatives: list[Alternative]) -> WhatIfResult:
    """Of a made run, by a model that is a little off."""
    run = made_run(folder, 5, num_requests=60, max_queue_len=20, max_num_seqs=2, max_num_batched_tokens=64)
    return what_if(run, alternatives, cost_model=slower(COST, 3), objectives=Objectives(ttft=120, tpot=20))


def table(result: WhatIfResult) -> str:
    """Without the place of the run."""
    return render(result).replace(result.path, "RUN") + "\n"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> WhatIfResult:
    return ask(tmp_path_factory.mktemp("runs"), ALTERNATIVES)


def test_the_table(result: WhatIfResult) -> None:
    assert table(result) == GOLDEN.read_text()


def test_alternatives_fit_120_columns(result: WhatIfResult, tmp_path: Path) -> None:
    known = what_if(run_of(tmp_path, requests_of([0, 5, 10])), ALTERNATIVES, cost_model=COST)
    for each, num_tables in ((result, 2), (known, 1)):
        lines = table(each).splitlines()
        assert max(map(len, lines)) <= MAX_WIDTH
        assert sum(line.split()[:2] == ["recorded", "baseline"] for line in lines) == num_tables


def test_more_alternatives_get_a_table_of_their_own_and_long_names_a_number(tmp_path: Path) -> None:
    alternatives = [policy("edf", multiplier=number / 2, min_deadline_ms=100) for number in range(2, 8)]
    lines = table(ask(tmp_path, alternatives)).splitlines()
    headings = [line.split() for line in lines if line.lstrip().startswith("recorded  ") and "baseline" in line]
    assert headings == [
        ["recorded", "baseline", "error", "bar", "[1]", "[2]"],
        ["recorded", "baseline", "error", "bar", "[3]", "[4]"],
        ["recorded", "baseline", "error", "bar", "[5]", "[6]"],
    ]
    assert "[4]            edf:multiplier=2.5,min_deadline_ms=100" in lines
    assert max(map(len, lines)) <= MAX_WIDTH


class _Cell(Struct, forbid_unknown_fields=True):
    value: float | int | None
    difference: float | int | None
    error_bar: float | None
    is_significant: bool


class _Metric(Struct, forbid_unknown_fields=True):
    unit: str
    better: str
    recorded: float | int | None
    baseline: float | int | None
    baseline_unpaced: float | int | None
    error_bar: float | None
    alternatives: list[_Cell]


class _Simulated(Struct, forbid_unknown_fields=True):
    name: str
    description: str
    num_steps: int
    num_steps_outside: int
    trace: str | None
    notes: list[str]
    requests: dict[str, int] = {}


class _Class(Struct, forbid_unknown_fields=True):
    name: str
    min_tokens: int
    max_tokens: int
    num_requests: int


class _Json(Struct, forbid_unknown_fields=True):
    """What programs may rely on."""

    path: str
    run: str
    recorded: dict[str, Any]
    null_test: dict[str, Any] | None
    cost_model: dict[str, Any]
    fit: dict[str, Any] | None
    objectives_ms: dict[str, float] | None
    baseline: _Simulated
    alternatives: list[_Simulated]
    num_requests: int
    num_censored: int
    num_draws: int
    closed_loop: dict[str, int] | None
    length_classes: list[_Class]
    request_error: float
    metrics: dict[str, _Metric]
    notes: list[str]
    warnings: list[str]


def test_the_json_has_these_fields_and_no_others(result: WhatIfResult) -> None:
    found = msgspec.json.decode(render_json(result), type=_Json)
    assert json.loads(render_json(result)).keys() == set(_Json.__struct_fields__)
    assert [each.name for each in found.alternatives] == ["edf", "lrs", "2 replicas", "num_blocks=40"]
    assert found.num_requests == sum(each.num_requests for each in found.length_classes) == 60
    latencies = {f"{name}_{quantile}" for name in ("ttft", "tpot", "e2e") for quantile in ("p50", "p90", "p99")}
    classes = {f"ttft_{quantile}_{each.name}" for quantile in ("p50", "p99") for each in found.length_classes}
    others = {"output_tokens_per_second", "requests_per_second", "deadlines_met", "slo_met", "fluidity_index"}
    counts = {"preemptions", "rejected", "cut_short", "unfinished"}
    assert found.metrics.keys() == latencies | classes | others | counts
    for metric in found.metrics.values():
        assert len(metric.alternatives) == 4
        assert metric.recorded is not None
    for each in found.alternatives:
        assert each.requests.keys() == {"num_won", "num_lost", "num_equal", "num_censored"}
        assert sum(each.requests.values()) == 60


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        GOLDEN.write_text(table(ask(Path(made), ALTERNATIVES)))
