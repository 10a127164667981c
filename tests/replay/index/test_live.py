"""The index of a run that is being written."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.run_folder import TRACE_NAME
from eventlm.replay.index.live import LiveIndex
from eventlm.replay.index.open import open_index
from eventlm.system.system import real_system
from tests.replay.golden import FOLDER
from tests.replay.index.runs import assert_same


def bodies(path: Path) -> list[bytes]:
    with LogReader(path) as reader:
        return [line.body for line in reader]


def append(writer: LogWriter, lines: list[bytes]) -> None:
    for body in lines:
        writer.append(body)
    writer.flush()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["", TRACE_NAME])
def test_a_run_is_read_on_while_it_is_written(tmp_path: Path, name: str, *, verify: bool) -> None:
    source = FOLDER / "edf_tight.jsonl"
    lines = bodies(source)
    with LogWriter(real_system(), tmp_path, "run") as writer:
        append(writer, lines[:60])
        live = LiveIndex(writer.run_folder / name if name else writer.run_folder, verify=verify)
        first = live.index
        assert (first.facts.next_s, first.facts.is_ended) == (60, False)
        assert not live.read_on()
        assert live.index is first
        append(writer, lines[60:])
        assert live.read_on()
        assert live.index.facts.next_s == len(lines)
        assert first.facts.next_s == 60
    assert_same(live.index, open_index(source, verify=verify))


def test_a_run_that_has_ended_is_not_read_again(tmp_path: Path) -> None:
    live = LiveIndex(FOLDER / "edf_tight.jsonl")
    assert live.index.facts.is_ended
    assert not live.read_on()
