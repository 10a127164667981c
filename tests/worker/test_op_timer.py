from __future__ import annotations

import pytest

from eventlm.worker import op_timer
from eventlm.worker.op_timer import OpTimer


def test_laps_add_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    times_ns = iter([100, 110, 115, 145, 146])
    monkeypatch.setattr(op_timer.time, "perf_counter_ns", lambda: next(times_ns))
    timer = OpTimer()
    for name in ("embed", "attention", "mlp", "attention"):
        timer.lap(name)
    assert timer.times_ns == {"embed": 10, "attention": 6, "mlp": 30}


def test_a_lap_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times_ns = iter([100, 110, 200])
    monkeypatch.setattr(op_timer.time, "perf_counter_ns", lambda: next(times_ns))
    timer = OpTimer()
    timer.lap("prepare")
    timer.share({"attention": 50, "mlp": 30}, rest="prepare")
    assert timer.times_ns == {"prepare": 20, "attention": 50, "mlp": 30}
