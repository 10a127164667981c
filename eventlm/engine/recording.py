"""Who writes an engine's log, as its configuration has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from eventlm.bus.log_writer import LogWriter
from eventlm.bus.recorder import Effect, Recorder, ThreadedRecorder
from eventlm.config import RecordConfig
from eventlm.config.sizes import memory_bytes
from eventlm.config.state_folder import runs_folder

log = structlog.get_logger("eventlm.engine")


def make_writer(record: RecordConfig, run: str, digest_key: bytes) -> LogWriter:
    """The writer of a run; the key goes into its token log, if it is to have one. Raises LogWriteError."""
    folder = Path(record.folder)
    return LogWriter(
        folder,
        run,
        segment_bytes=memory_bytes(record.record_segment),
        keep_bytes=memory_bytes(record.record_keep),
        keep_all_runs=folder == runs_folder(),
        digest_key=digest_key if record.record_tokens else b"",
        on_problem=log.warning,
    )


def make_recorder(record: RecordConfig, writer: LogWriter, guard: Callable[[Effect], None]) -> Recorder:
    """The recorder on top of it, of the running loop. `guard`: as of ThreadedRecorder."""
    if record.record_lag == "wait":
        return Recorder(writer)
    return ThreadedRecorder(
        writer,
        loop=asyncio.get_running_loop(),
        lag_seconds=record.record_lag_ms / 1000,
        lag_bytes=memory_bytes(record.record_lag_memory),
        on_problem=log.warning,
        guard=guard,
    )
