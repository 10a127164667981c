"""Spans of a run that goes on: every request's, over deaths of the process, dead endpoints, and the end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import structlog.testing

from eventlm.engine.inference_engine import InferenceEngine
from eventlm.system.system import real_system
from eventlm.telemetry import exporter as module
from eventlm.telemetry.exporter import SpanExporter
from tests.engine.engines import request, running
from tests.processes import PATIENCE_SECONDS, is_running, until
from tests.telemetry.receiver import check_phases_add_up, receiving

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may wait for a processor."""
    monkeypatch.setattr(module, "STOP_SECONDS", PATIENCE_SECONDS)


def exporter_of(engine: InferenceEngine, url: str) -> SpanExporter:
    assert engine.run_folder is not None
    exporter = SpanExporter(real_system(), engine.run_folder, f"{url}/v1/traces")
    exporter.start()
    return exporter


async def serve(engine: InferenceEngine, count: int) -> list[int]:
    handles = await engine.submit([request(seed=number) for number in range(count)])
    for handle in handles:
        async for _ in handle:
            pass
    return [handle.request for handle in handles]


async def test_requests_arrive_while_the_run_goes_on(tmp_path: Path) -> None:
    with receiving() as receiver:
        async with running(record=tmp_path) as engine:
            exporter = exporter_of(engine, receiver.url)
            requests = await serve(engine, 3)
            exporter.note_caller(f"00-{TRACE}-{SPAN}-01", requests[:1])
            await until(lambda: len(receiver.roots) == 3)
            await until(lambda: exporter.metrics().num_sent == len(receiver.spans))
            requests += await serve(engine, 2)
            pid = exporter.pid
            await engine.stop()
            await exporter.stop()
        assert sorted(receiver.roots) == requests
        assert check_phases_add_up(receiver.spans) == 5
        assert receiver.roots[requests[0]].trace_id.hex() == TRACE
        metrics = exporter.metrics()
        assert (metrics.num_sent, metrics.num_dropped, metrics.num_restarts) == (len(receiver.spans), {}, 0)
        assert not metrics.is_up
        assert not is_running(pid)
    await exporter.stop()


async def test_another_process_goes_on_where_one_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.01)
    with receiving() as receiver:
        async with running(record=tmp_path, fake={"base_ns": 5_000_000}) as engine:
            exporter = exporter_of(engine, receiver.url)
            done = await serve(engine, 2)
            await until(lambda: sorted(receiver.roots) == done)
            (live,) = await engine.submit([request(max_tokens=100)])
            exporter.note_caller(f"00-{TRACE}-{SPAN}-01", [live.request])
            pid = exporter.pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda: exporter.pid not in (0, pid))
            async for _ in live:
                pass
            await engine.stop()
            await exporter.stop()
        assert sorted(receiver.roots) == [*done, live.request]
        # Although the request arrived before it, and its caller was told to the one that was killed.
        assert receiver.roots[live.request].trace_id.hex() == TRACE
        assert check_phases_add_up(receiver.spans) == 3
        assert exporter.metrics().num_restarts == 1


async def test_a_dead_endpoint_holds_nobody_up(tmp_path: Path, unused_tcp_port: int) -> None:
    async with running(record=tmp_path) as engine:
        with structlog.testing.capture_logs() as logs:
            exporter = exporter_of(engine, f"http://127.0.0.1:{unused_tcp_port}")
            await serve(engine, 4)
            await until(lambda: exporter.metrics().num_failures > 0)
            await engine.stop()
            await exporter.stop()
    assert exporter.metrics().num_sent == 0
    assert exporter.metrics().num_dropped == {"not_sent": 4 * 3}
    events = [(line["event"], line["log_level"]) for line in logs]
    assert ("spans cannot be sent", "warning") in events
    assert ("spans exported", "warning") in events


async def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(record=tmp_path) as engine:
        exporter = exporter_of(engine, "http://127.0.0.1:9")
        await until(lambda: exporter.pid)
        pid = exporter.pid
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(module, "STOP_SECONDS", 0.05)
        await asyncio.wait_for(exporter.stop(), PATIENCE_SECONDS)
        await until(lambda: not is_running(pid))


async def test_one_that_dies_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MODULE", "no_such_module_of_ours")
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.001)
    with structlog.testing.capture_logs() as logs:
        exporter = SpanExporter(real_system(), tmp_path, "http://127.0.0.1:9")
        exporter.start()
        await until(lambda: any(line["log_level"] == "error" for line in logs))
        assert exporter.metrics().num_restarts == module.MAX_FAILURES
        assert not exporter.metrics().is_up
        await exporter.stop()
