"""Engines whose disk lags: with `record_lag` gap nobody waits, and the trace says what it lacks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.bus.log_writer import LogWriter
from eventlm.bus.recorder import ThreadedRecorder
from eventlm.bus.subscription import Lagged
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.errors import InvariantError
from eventlm.events import Event, Gap
from eventlm.replay.verify.verifier import verify
from eventlm.system.system import real_system
from tests.bus.slow_disk import SECONDS, HandLoop, SlowDisk
from tests.bus.token_logs import facts_without_tokens
from tests.engine.engines import expected_tokens, fake_setup, generate, request
from tests.replay.executions import execute_fake
from tests.simulation import DIGEST_KEY, Simulation


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.answer()


def threaded(writer: LogWriter, kind: type[ThreadedRecorder] = ThreadedRecorder, **options: Any) -> ThreadedRecorder:
    return kind(
        real_system(),
        writer,
        loop=HandLoop(),  # type: ignore[arg-type]
        lag_seconds=SECONDS,
        lag_bytes=1 << 20,
        on_problem=lambda _: None,
        guard=lambda effect: effect(),
        **options,
    )


def run_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("segment_bytes", [0, 8192])
def test_without_a_lag_the_trace_is_the_same(segment_bytes: int, tmp_path: Path) -> None:
    for seed in range(6):
        waiting = LogWriter(real_system(), tmp_path / "wait", f"{seed}", segment_bytes=segment_bytes)
        expected = Simulation(seed, writer=waiting, check_every=0).run()
        writer = LogWriter(real_system(), tmp_path / "gap", f"{seed}", segment_bytes=segment_bytes)
        assert Simulation(seed, recorder=threaded(writer), check_every=0).run() == expected
        assert run_files(writer.run_folder) == run_files(waiting.run_folder)


class Hesitant(ThreadedRecorder):
    """Its disk hangs now and then, for some drains, and is given up each time."""

    def __init__(self, *arguments: Any, disk: SlowDisk, seed: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_hangs = 0
        self._disk = disk
        self._rng = random.Random(seed)
        self._hangs = False

    def write(self, *arguments: Any, **options: Any) -> None:
        if not self._hangs and not self.problem and self._rng.random() < 0.1:
            self._hangs = True
            self.num_hangs += 1
            self._disk.hang()
        super().write(*arguments, **options)

    def settle(self) -> None:
        if self._hangs:
            assert self._disk.hangs.wait(SECONDS)
            self._loop.sleep(2 * SECONDS)  # type: ignore[attr-defined]
            if self._rng.random() < 0.7:
                return
            self._answer()
        super().settle()

    def close(self) -> None:
        self._answer()
        super().close()

    def _answer(self) -> None:
        self._hangs = False
        self._disk.answer()


def test_with_a_lag_everybody_gets_his_own_and_the_trace_verifies(disk: SlowDisk, tmp_path: Path) -> None:
    num_missing = num_clean_ends = 0
    for seed in range(6):
        has_tokens = seed % 2 == 1
        digest_key = DIGEST_KEY if has_tokens else b""
        writer = LogWriter(
            real_system(), tmp_path, f"{seed}", segment_bytes=0 if seed % 3 else 8192, digest_key=digest_key
        )
        recorder = threaded(writer, Hesitant, disk=disk, seed=seed)
        simulation = Simulation(seed, recorder=recorder, check_every=0, records_tokens=has_tokens)
        # It sees to it that everybody gets what is his, in order.
        simulation.run()
        assert isinstance(recorder, Hesitant)
        assert recorder.num_hangs
        result = verify(writer.run_folder)
        assert result.divergence is None, seed
        assert result.exit_code == (14 if result.num_missing else 0)
        num_missing += result.num_missing
        if has_tokens:
            # What is recorded has its tokens, and what comes before the first gap can be run again.
            assert facts_without_tokens(writer.run_folder) == []
            assert execute_fake(writer.run_folder).exit_code == result.exit_code
        if result.clean_end:
            num_clean_ends += 1
            assert writer.num_events + result.num_missing == simulation.engine_core.core.next_seq
    assert num_missing > 500
    assert num_clean_ends > 2


# --- the engine


def lagging(folder: Path) -> InferenceEngine:
    """It waits for a disk that works as long as tests wait for anything."""
    setup = fake_setup(record=folder)
    record = structs.replace(setup.config.record, record_lag="gap", record_lag_ms=1000 * SECONDS)
    return InferenceEngine(structs.replace(setup, config=structs.replace(setup.config, record=record)), real_system())


def recorder_of(engine: InferenceEngine) -> ThreadedRecorder:
    assert engine._run is not None
    assert isinstance(engine._run.recorder, ThreadedRecorder)
    return engine._run.recorder


def hang(disk: SlowDisk, engine: InferenceEngine) -> None:
    """From the next write on. Nobody waits for that one for long."""
    recorder = recorder_of(engine)
    recorder.settle()
    if recorder._timer is not None:
        recorder._timer.cancel()
        recorder._timer = None
    recorder._lag_seconds = 0.05
    disk.hang()


def is_writing(engine: InferenceEngine) -> bool:
    recorder = engine.metrics().recorder
    assert recorder is not None
    return recorder.is_writing


async def test_streams_go_on_while_the_disk_hangs(disk: SlowDisk, tmp_path: Path) -> None:
    engine = lagging(tmp_path)
    await engine.start()
    try:
        await generate(engine, request(4))
        hang(disk, engine)
        during = await generate(engine, request(30), request(30, seed=6))
        assert [reader.tokens for reader in during] == [[expected_tokens(seed, 0, 30)] for seed in (5, 6)]
        assert not is_writing(engine)
        late, gaps = engine.bus.subscribe(from_seq=0), engine.bus.subscribe(kinds=(Gap,))
        recorder_of(engine)._lag_seconds = SECONDS
        disk.answer()
        await asyncio.wait_for(anext(gaps), SECONDS)
        assert is_writing(engine)
        await generate(engine, request(4))
    finally:
        await engine.stop()
    assert engine.run_folder is not None
    result = verify(engine.run_folder, check_invariants=True)
    assert (result.exit_code, result.divergence, result.clean_end) == (14, None, True)
    assert result.num_missing > 20
    assert any("a write took longer than 50 ms" in warning for warning in result.warnings)
    assert [verify(path).exit_code for path in sorted(engine.run_folder.glob("*.jsonl"))] == [0, 0]
    # Who comes late gets what is written, and is told of what is not.
    items = [item async for item in late]
    [lagged] = [item for item in items if isinstance(item, Lagged)]
    assert lagged.to_seq - lagged.from_seq + 1 == result.num_missing
    assert sum(isinstance(item, Event) for item in items) + result.num_missing == items[-1].s + 1


async def test_in_a_group_nothing_is_shown_before_it_is_synced(disk: SlowDisk, tmp_path: Path) -> None:
    setup = fake_setup(record=tmp_path)
    record = structs.replace(setup.config.record, record_sync="group")
    setup = structs.replace(setup, config=structs.replace(setup.config, record=record))
    engine = InferenceEngine(setup, real_system())
    await engine.start()
    try:
        disk.hang(takes_writes=True)
        generating = asyncio.ensure_future(generate(engine, request(30)))
        assert await asyncio.to_thread(disk.hangs.wait, SECONDS)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not generating.done()
        disk.answer()
        (reader,) = await asyncio.wait_for(generating, SECONDS)
        assert reader.tokens == [expected_tokens(5, 0, 30)]
        metrics = engine.metrics().recorder
        assert metrics is not None
        assert sum(metrics.sync_time.counts) > 2
    finally:
        await engine.stop()
    assert engine.run_folder is not None
    result = verify(engine.run_folder, check_invariants=True)
    assert (result.exit_code, result.clean_end) == (0, True)


async def test_an_engine_stops_while_the_disk_hangs(disk: SlowDisk, tmp_path: Path) -> None:
    engine = lagging(tmp_path)
    await engine.start()
    hang(disk, engine)
    await generate(engine, request(4))
    await asyncio.wait_for(engine.stop(), SECONDS)
    assert engine.state == "dead"
    disk.answer()


async def test_a_core_that_breaks_after_a_gap_kills_the_engine(
    disk: SlowDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_asked = asyncio.Event()

    def broken() -> bytes:
        was_asked.set()
        raise InvariantError("it is broken")

    engine = lagging(tmp_path)
    await engine.start()
    try:
        monkeypatch.setattr(engine._require_engine_core().core, "snapshot", broken)
        hang(disk, engine)
        await generate(engine, request(30))
        disk.answer()
        await asyncio.wait_for(was_asked.wait(), SECONDS)
        assert engine.state == "dead"
    finally:
        await asyncio.wait_for(engine.stop(), SECONDS)
