"""Lines between two events."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.replay.debugger.lines import lines_between
from tests.replay.golden import FOLDER


def test_nothing_behind_the_last_line_is_read(tmp_path: Path) -> None:
    lines = (FOLDER / "edf_tight.jsonl").read_bytes().split(b"\n")
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join([*lines[:50], b"damage", b""]))
    with LogReader(path) as reader:
        assert [line.s for line in lines_between(reader, 45, 49)] == [45, 46, 47, 48, 49]
        assert [line.s for line in lines_between(reader, -1, 2)] == [0, 1, 2]
        assert list(lines_between(reader, 5, 4)) == []
