"""A what-if in a report."""

from __future__ import annotations

from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.look.report.alternatives import ask
from eventlm.types import TimeWindow
from tests.replay.golden import FOLDER


def test_each_metric_has_its_error() -> None:
    path = str(FOLDER / "edf_tight.jsonl")
    policies = [parse_plugin_spec(each) for each in ("fcfs", "lrs")]
    found = ask(path, policies, window=TimeWindow(0, 80_000_000), trust_local_plugins=False)
    assert found["names"] == ["fcfs", "lrs"]
    metrics = {each["name"]: each for each in found["metrics"]}
    assert metrics["ttft_p99"]["unit"] == "ns"
    for metric in metrics.values():
        assert metric["recorded"] is not None
        assert len(metric["cells"]) == 2
    assert all(cell["bar"] > 0 for cell in metrics["ttft_p99"]["cells"])
    assert len(found["wonLost"]) == 2
    assert any("window" in note for note in found["notes"])
