"""What findings are computed from."""

from __future__ import annotations

from collections.abc import Callable

from eventlm.look.findings.finding import RunColumns
from eventlm.replay.index.index import Index


def test_times_add_up_and_plugins_are_named(planted_index: Callable[[str], Index]) -> None:
    run = RunColumns(planted_index("one_sided_router"))
    assert run.time(run.drain_ns >= 0) == run.total_ns == run.index.facts.last_ns - int(run.index.drains["ts"][0])
    assert run.plugin("router") == "router tests.look.planted:OneSidedRouter"
    assert run.plugin("policy") == "policy fcfs"
    assert (run.waited_ns <= run.e2e_ns).all()
    assert run.share_ppm(1, 0) == 0
    drain = run.index.drains.row(3)
    assert [run.planned_s(drain[name]) for name in ("s", "next_s")] == run.index.drains["s"][3:5].tolist()
    assert run.planned_s(run.index.facts.next_s) == run.index.facts.next_s
