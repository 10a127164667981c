"""What plug-ins did wrong is told in the log of the process, and not for each step."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from eventlm.engine.plugins import failures as plugin_failures
from eventlm.engine.plugins.failures import PluginFailures
from eventlm.events import PluginFailed, WorkerUp
from tests.engine.engines import generate, request, running


def test_the_first_is_reported_and_then_fewer_and_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(plugin_failures, "log", log)
    failures = PluginFailures()
    failures.observe(WorkerUp(s=1, replica=0, epoch=1))
    for number in range(1, 121):
        failures.observe(PluginFailed(s=10 * number, error=f"the policy raised {number}"))
    assert [call.kwargs["num_failures"] for call in log.calls] == [1, 10, 100]
    assert [call.kwargs["seq"] for call in log.calls] == [10, 100, 1000]
    assert [call.kwargs["error"] for call in log.calls] == [f"the policy raised {number}" for number in (1, 10, 100)]


async def test_an_engine_reports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(plugin_failures, "log", log)
    (tmp_path / "failing_policy.py").write_text(
        "from eventlm.core.plugin import Policy\n\n\n"
        "class Failing(Policy, frozen=True, kw_only=True):\n"
        "    def keys(self, sequences, now_ns):\n"
        "        return [sequence.nothing for sequence in sequences]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with running(policy={"type": "failing_policy:Failing"}) as engine:
        [outcome] = await generate(engine, request())
        assert outcome.reasons == ["length"]
        assert engine.metrics().log.num_plugin_failures > 0
    assert log.calls[0].kwargs["error"] == "the policy raised AttributeError"
