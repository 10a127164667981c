"""The log of an engine over real fake workers, and who reads it: disks that are full, segments, subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.bus import log_writer
from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.events import Event
from eventlm.events.codec import encode_body
from eventlm.replay.verify.verifier import verify
from eventlm.system.system import real_system
from tests.engine.engines import expected_tokens, fake_setup, generate, recorded, request, running
from tests.processes import PATIENCE_SECONDS


def refuse(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def full_disk(engine: InferenceEngine) -> Iterator[None]:
    """Every write of the recorder fails meanwhile, and none is tried again before the end; then one is at once."""
    assert engine._run is not None
    assert engine._run.recorder is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_writer, "RETRY_NS", 10**18)
        patch.setattr("eventlm.system.disk._WritableFile.write", refuse)
        yield
    engine._run.recorder.writer._retry_at_ns = 0


def run_files(engine: InferenceEngine) -> list[Path]:
    assert engine.run_folder is not None
    return sorted(engine.run_folder.glob("*.jsonl"))


async def test_a_folder_that_cannot_be_recorded_to_costs_no_worker(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogWriteError, match="choose another folder"):
        await InferenceEngine(fake_setup(record=tmp_path / "file"), real_system()).start()


async def test_a_full_disk_stops_no_request_and_leaves_a_gap(tmp_path: Path) -> None:
    async with running(record=tmp_path) as engine:
        await generate(engine, request(4))
        with full_disk(engine):
            during = await generate(engine, request(20))
            recorder = engine.metrics().recorder
            assert recorder is not None
            assert recorder.num_events_behind > 20
            assert not recorder.is_writing
        after = await generate(engine, request(4))
        assert [outcome.reasons for outcome in (*during, *after)] == [["length"], ["length"]]
        recorder = engine.metrics().recorder
        assert recorder is not None
        assert (recorder.num_events_behind, recorder.is_writing) == (0, True)
        assert recorder.num_bytes == sum(path.stat().st_size for path in run_files(engine))
    assert engine.run_folder is not None
    result = verify(engine.run_folder, check_invariants=True)
    assert (result.exit_code, result.divergence, result.clean_end) == (14, None, True)
    assert result.num_missing > 20
    assert result.num_segments == 2
    assert [verify(path).exit_code for path in run_files(engine)] == [0, 0]


async def test_a_disk_that_stays_full_stops_no_request_either(tmp_path: Path) -> None:
    async with running(record=tmp_path) as engine:
        with full_disk(engine):
            assert (await generate(engine, request(20)))[0].reasons == ["length"]
            await engine.stop()
    assert engine.run_folder is not None
    result = verify(engine.run_folder)
    assert (result.divergence, result.clean_end) == (None, False)


async def test_segments_of_a_run_verify_together_and_alone(tmp_path: Path) -> None:
    setup = fake_setup(record=tmp_path)
    record = structs.replace(setup.config.record, record_segment="4KiB")
    engine = InferenceEngine(structs.replace(setup, config=structs.replace(setup.config, record=record)), real_system())
    await engine.start()
    events = engine.bus.subscribe(from_seq=0, capacity=1 << 20)

    async def read() -> list[Event]:
        return [event async for event in events]  # type: ignore[misc]

    reading = asyncio.create_task(read())
    for _ in range(6):
        await generate(engine, request(40), request(40))
    late = engine.bus.subscribe(from_seq=0)
    first = [await anext(late) for _ in range(20)]
    await late.aclose()
    await engine.stop()
    assert engine.run_folder is not None
    with LogReader(engine.run_folder) as reader:
        lines = [encode_body(line.event()) for line in reader]
    assert [encode_body(event) for event in await asyncio.wait_for(reading, PATIENCE_SECONDS)] == lines
    assert [encode_body(event) for event in first if isinstance(event, Event)] == lines[:20]
    whole = verify(engine.run_folder, check_invariants=True)
    assert (whole.exit_code, whole.warnings) == (0, [])
    assert whole.num_segments == len(run_files(engine)) > 3
    alone = [verify(path) for path in run_files(engine)]
    assert all(result.exit_code == 0 for result in alone)
    assert sum(result.num_decisions for result in alone) == whole.num_decisions


async def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(LogWriteError, match="File too large"):
            await InferenceEngine(fake_setup(record=tmp_path), real_system()).start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_subscribers_see_the_run_from_its_first_event_to_its_last(tmp_path: Path) -> None:
    async with running(record=tmp_path) as engine:
        await generate(engine, request(4))
        events = engine.bus.subscribe(from_seq=0)

        async def read() -> list[Event]:
            return [event async for event in events]  # type: ignore[misc]

        reading = asyncio.create_task(read())
        await generate(engine, request(4))
    assert await asyncio.wait_for(reading, PATIENCE_SECONDS) == recorded(engine)


async def test_an_observer_that_raises_is_detached() -> None:
    async with running() as engine:
        seen: list[Event] = []

        def observe(event: Event) -> None:
            seen.append(event)
            raise RuntimeError("broken")

        engine.bus.attach(observe)
        assert (await generate(engine, request(4)))[0].reasons == ["length"]
        assert len(seen) == 1


async def test_a_state_folder_that_takes_no_trace_does_not_keep_the_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The link to the newest run cannot be made there, which shows only when the folder has been checked.
    (tmp_path / "latest").mkdir()
    monkeypatch.setattr(LogWriter, "check_folder", lambda disk, folder: None)
    with pytest.raises(LogWriteError, match="cannot replace"):
        async with running(record=tmp_path):
            pass
    monkeypatch.setattr("eventlm.engine.engine_run.runs_folder", lambda: tmp_path)
    async with running(record=tmp_path) as engine:
        [reader] = await generate(engine, request(3))
        assert reader.tokens == [expected_tokens(5, 0, 3)]
        assert engine.run_folder is None
        assert engine.metrics().recorder is None
