"""How the configuration of a record becomes a writer and a recorder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventlm.bus.log_writer import LogWriteError
from eventlm.bus.recorder import Recorder, ThreadedRecorder
from eventlm.config import RecordConfig
from eventlm.engine.engine_run import make_recorder, make_writer
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus import traces


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_token_log_is_written_only_where_it_was_asked_for(tmp_path: Path, *, has_tokens: bool) -> None:
    record = RecordConfig(record=str(tmp_path), record_tokens=has_tokens)
    with make_writer(real_system(), record, "run", b"k" * 32) as writer:
        writer.append(encode_body(traces.header()))
    assert sorted(os.listdir(tmp_path / "run")) == ["tokens.jsonl"] * has_tokens + ["trace.jsonl"]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogWriteError, match="cannot record to"):
        make_writer(real_system(), RecordConfig(record=str(tmp_path / "file" / "runs")), "run", b"")


async def test_a_recorder_waits_for_the_disk_or_has_a_thread(tmp_path: Path) -> None:
    for lag, sync, kind in (
        ("wait", "none", Recorder),
        ("gap", "none", ThreadedRecorder),
        ("wait", "interval", ThreadedRecorder),
        ("gap", "group", ThreadedRecorder),
    ):
        record = RecordConfig(record=str(tmp_path), record_lag=lag, record_sync=sync)
        writer = make_writer(real_system(), record, f"{lag} {sync}", b"")
        recorder = make_recorder(real_system(), record, writer, lambda effect: effect())
        assert type(recorder) is kind
        recorder.close()
