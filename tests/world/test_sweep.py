"""A short script, with a death at each call into the system that its processes make."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from eventlm.bus.recorder import Effect, Recorder, ThreadedRecorder
from eventlm.bus.segment_file import SegmentFile
from eventlm.config import Config, ModelConfig, RecordConfig, SchedulerConfig
from tests.world.invariants.checks import BrokenInvariant
from tests.world.machine.disk import WorldDisk
from tests.world.machine.process import Death
from tests.world.machine.world import SECOND
from tests.world.plans.plan import Plan, Visit
from tests.world.programs.server import WorldServer
from tests.world.run import Ran, Run, quiet

_SERVER, _WORKER = "engine", "eventlm.worker.process 1 of engine"
_WHEN = ("before", "halfway", "after")


def _visit(number: int, *, prompt: str, tokens: int, **fields: Any) -> Visit:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "seed": 7 + number, "n": 1, "stream": True, **fields}
    return Visit(number, number * SECOND // 20, body, "/v1/completions", -1)


def _plan(deaths: dict[str, Death], **record: str) -> Plan:
    """Three requests for one worker, with small log segments. If the next server goes on, their clients come back."""
    num_tries = 1 if record.get("recover") else 0
    visits = [
        _visit(0, prompt="p" * 70, tokens=12),
        _visit(1, prompt="p" * 20, tokens=8, n=2),
        _visit(2, prompt="p" * 70, tokens=5, stream=False),
    ]
    return Plan(
        seed=1,
        is_calm=not deaths,
        config=Config(
            model=ModelConfig(model="fake", fake={"base_ns": 10_000_000}),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
            record=RecordConfig(record="/runs", record_segment="8KiB", checkpoint_events=5, validate_every=1, **record),
        ),
        num_blocks=32,
        seconds=2,
        visits=[each._replace(num_tries=num_tries) for each in visits],
        faults=[],
        deaths=deaths,
    )


class _PowerCuts(Run):
    """The power is cut when the first server dies, and nothing stays that was not synced."""

    def start_server(self, name: str) -> WorldServer:
        """As Run.start_server."""
        server = super().start_server(name)
        if name == _SERVER and self._plan.deaths:
            server.process.on_end(lambda _: self.world.after(0, self._cut_power))
        return server

    def _cut_power(self) -> None:
        with patch.object(WorldDisk, "_keep", lambda self, what, number: [False] * number):
            self.lives.reboot()


def _run(plan: Plan) -> Ran:
    with quiet() as lines:
        return Run(plan, lines).run()


def _sweep(process: str, *, every: int, kind: type[Run] = Run, **record: str) -> Counter[str]:
    """Kill a process at each `every`-th of its calls. Returns what was checked."""
    # A death that never comes: without one, the run makes some more calls at its end.
    num_calls = _run(_plan({process: Death(1_000_000, "before")}, **record)).num_calls[process]
    checks: Counter[str] = Counter()
    for number, (call, when) in enumerate(product(range(1, num_calls + 1), _WHEN)):
        if number % every == 0:
            with quiet() as lines:
                ran = kind(_plan({process: Death(call, when)}, **record), lines).run()  # type: ignore[arg-type]
            assert ran.hits.get(f"{process.partition(' ')[0]} killed {when} a call") == 1, (call, when)
            # Work that the killed worker had in hand is done again.
            assert process != _WORKER or ran.checks["whole texts are the reference's"] == 4, (call, when)
            checks.update(ran.checks)
    return checks


@pytest.mark.parametrize("record_lag", ["wait", "gap"])
def test_a_server_killed_at_any_call_leaves_a_log_of_all_that_was_shown(record_lag: str) -> None:
    checks = _sweep(_SERVER, every=41, record_lag=record_lag)
    assert checks["nothing shown that the log lacks"] > 50
    assert checks["segments verify alone"] > 2
    assert checks["connections end with the server"] > 2


def test_a_worker_killed_at_any_call_takes_nothing_with_it() -> None:
    assert _sweep(_WORKER, every=23)["whole texts are the reference's"] > 10


def test_an_effect_before_its_write_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = ThreadedRecorder.write

    def release(self: ThreadedRecorder, bodies: list[bytes], then: Effect, **beside: Sequence[bytes]) -> None:
        then()
        write(self, bodies, lambda: None, **beside)

    monkeypatch.setattr(ThreadedRecorder, "write", release)
    with pytest.raises(BrokenInvariant, match="the log lacks"):
        _run(_plan({}, record_lag="gap"))


def test_an_effect_just_before_its_write_is_found_by_a_death_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Recorder.write

    def release(self: Recorder, bodies: list[bytes], then: Effect, **beside: Sequence[bytes]) -> None:
        if not self.writer.num_events:
            write(self, bodies, then, **beside)
            return
        self._append(bodies, beside.get("tokens", ()), beside.get("records", ()))
        then()
        # By that time, data has been sent to clients, but they have not read it.
        asyncio.get_running_loop().call_soon(self.writer.flush)

    monkeypatch.setattr(Recorder, "write", release)
    # Otherwise a new segment would begin before the pending bodies are written.
    monkeypatch.setattr(Recorder, "segment_due", False)
    _run(_plan({}))
    with pytest.raises(BrokenInvariant, match="the log lacks"):
        _sweep(_SERVER, every=10)


def test_a_power_failure_at_any_call_leaves_a_log_of_all_that_was_shown() -> None:
    checks = _sweep(_SERVER, every=61, kind=_PowerCuts, record_sync="group")
    assert checks["a reboot leaves what was synced"] > 3


@pytest.mark.parametrize(("recover", "record_sync"), [("memory", "none"), ("/spool", "interval"), ("/spool", "group")])
def test_an_engine_goes_on_wherever_the_one_before_was_killed(recover: str, record_sync: str) -> None:
    checks = _sweep(_SERVER, every=67, recover=recover, record_sync=record_sync)
    assert checks["the next engine goes on"] > 3
    assert checks["what was acknowledged outlives its engine"] > 3


def test_an_engine_goes_on_wherever_the_power_has_failed() -> None:
    checks = _sweep(_SERVER, every=79, kind=_PowerCuts, recover="/spool", record_sync="group")
    assert checks["the next engine goes on"] > 3
    assert checks["what was acknowledged outlives its engine"] > 2


def test_a_sync_that_is_left_out_is_found_by_a_power_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentFile, "sync", lambda self: None)
    with pytest.raises(BrokenInvariant, match="a reboot leaves what was synced"):
        _sweep(_SERVER, every=10, kind=_PowerCuts, record_sync="group")


@pytest.mark.soak
@pytest.mark.parametrize("record_lag", ["wait", "gap"])
@pytest.mark.parametrize("process", [_SERVER, _WORKER])
def test_a_process_can_be_killed_at_every_call(process: str, record_lag: str) -> None:
    _sweep(process, every=1, record_lag=record_lag)


@pytest.mark.soak
@pytest.mark.parametrize("record_sync", ["none", "interval", "group"])
@pytest.mark.parametrize("recover", ["memory", "/spool"])
@pytest.mark.parametrize("kind", [Run, _PowerCuts])
def test_an_engine_goes_on_after_every_call(kind: type[Run], recover: str, record_sync: str) -> None:
    _sweep(_SERVER, every=1, kind=kind, recover=recover, record_sync=record_sync)


@pytest.mark.soak
@pytest.mark.parametrize("record_sync", ["none", "interval", "group"])
def test_the_power_can_fail_at_every_call(record_sync: str) -> None:
    _sweep(_SERVER, every=1, kind=_PowerCuts, record_sync=record_sync)
