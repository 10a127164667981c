"""Every way to damage one place of a trace is found, and found there."""

from __future__ import annotations

import os
import random
import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from eventlm.bus.log_reader import LogReader, TornTail
from eventlm.errors import TraceCorruptError
from tests.bus import traces

PLACE = re.compile(r"is damaged at line (\d+), byte (\d+): ")


def _offsets(closed: list[bytes]) -> list[int]:
    return list(accumulate(map(len, closed), initial=0))[:-1]


def _found_at(path: Path) -> tuple[int, int, str]:
    """Line, byte and explanation of the damage that reading the trace finds; (0, 0, "") for none."""
    try:
        with LogReader(path) as reader:
            for _line in reader:
                pass
    except TraceCorruptError as error:
        index = PLACE.search(str(error))
        assert index is not None
        return int(index[1]), int(index[2]), str(error)[index.end() :]
    return 0, 0, ""


def _flips(closed: list[bytes]) -> Iterator[tuple[int, int]]:
    """(byte, mask): one random bit of every byte, and every bit of the bytes that give the trace its form."""
    rng = random.Random(7)
    for start, line in zip(_offsets(closed), closed, strict=True):
        for at in range(len(line)):
            is_form = len(line) - at <= 27 or line[at : at + 1] in b'{}[]",:'
            for bit in range(8) if is_form and start < 2048 else [rng.randrange(8)]:
                yield start + at, 1 << bit


def test_every_flipped_byte_of_a_6_kib_trace_is_found_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    closed = traces.write(path, traces.events(20, rows=120))
    offsets = _offsets(closed)
    content = b"".join(closed)
    assert len(content) >= 6 * 1024
    final_newline = len(content) - 1
    fd = os.open(path, os.O_WRONLY)
    try:
        for at, mask in _flips(closed):
            os.pwrite(fd, bytes([content[at] ^ mask]), at)
            index = bisect_right(offsets, at) - 1
            if at == final_newline:
                with LogReader(path) as reader:
                    assert sum(1 for _ in reader) == len(closed) - 1
                    assert reader.torn == TornTail(len(closed), offsets[-1], len(closed[-1]))
            else:
                assert _found_at(path)[:2] == (index + 1, offsets[index]), (at, mask)
            os.pwrite(fd, content[at : at + 1], at)
    finally:
        os.close(fd)
    with LogReader(path) as reader:
        assert sum(1 for _ in reader) == len(closed)


def test_every_removed_line_is_found_where_the_next_one_stands(tmp_path: Path) -> None:
    path = tmp_path / "t"
    closed = traces.lines(traces.events(300, rows=20))
    offsets = _offsets(closed)
    for removed in range(len(closed) - 1):
        path.write_bytes(b"".join(closed[:removed] + closed[removed + 1 :]))
        line_number, byte_offset, what = _found_at(path)
        assert (line_number, byte_offset) == (removed + 1, offsets[removed])
        if 0 < removed < len(closed) - 2:
            assert what == f"event {removed} is missing, event {removed + 1} follows event {removed - 1}"


def test_removed_runs_of_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "t"
    closed = traces.lines(traces.events(30))
    path.write_bytes(b"".join(closed[:10] + closed[15:]))
    assert _found_at(path)[2] == "events 10 to 14 are missing, event 15 follows event 9"


def test_without_its_last_line_a_trace_has_no_clean_end(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"".join(traces.lines(traces.events(30))[:-1]))
    with LogReader(path) as reader:
        assert sum(1 for _ in reader) == 29
        assert not reader.clean_end


def test_every_swapped_pair_of_neighbours_is_found_at_the_first(tmp_path: Path) -> None:
    path = tmp_path / "t"
    closed = traces.lines(traces.events(300, rows=20))
    offsets = _offsets(closed)
    for first in range(len(closed) - 1):
        swapped = list(closed)
        swapped[first], swapped[first + 1] = swapped[first + 1], swapped[first]
        path.write_bytes(b"".join(swapped))
        line_number, byte_offset, what = _found_at(path)
        assert (line_number, byte_offset) == (first + 1, offsets[first])
        if first > 0:
            assert what == f"events {first} and {first + 1} have changed places"


def test_random_swapped_pairs_are_found_at_the_first(tmp_path: Path) -> None:
    path = tmp_path / "t"
    closed = traces.lines(traces.events(300, rows=20))
    offsets = _offsets(closed)
    rng = random.Random(3)
    for _ in range(500):
        first, second = sorted(rng.sample(range(len(closed)), 2))
        swapped = list(closed)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        path.write_bytes(b"".join(swapped))
        assert _found_at(path)[:2] == (first + 1, offsets[first])


def test_repeated_and_inserted_lines_are_found(tmp_path: Path) -> None:
    path = tmp_path / "t"
    closed = traces.lines(traces.events(50))
    offsets = _offsets(closed)
    for at in range(1, len(closed)):
        for inserted in (closed[at - 1], b"\n", b"{}\n"):
            path.write_bytes(b"".join(closed[:at]) + inserted + b"".join(closed[at:]))
            assert _found_at(path)[:2] == (at + 1, offsets[at])


def test_what_a_line_says_of_its_damage(tmp_path: Path) -> None:
    path = tmp_path / "t"
    closed = traces.lines(traces.events(6))
    cases = [
        (closed[3].replace(b'"ts":3000', b'"ts":3001'), "its hash does not match: it says "),
        (closed[3].replace(b'"ts":3000', b'"ts"!3000'), "it is not JSON, and its hash"),
        (closed[3].replace(b',"h":"', b',"H":"'), "it does not end in its hash"),
        (closed[3].replace(b'{"t":', b'{"T":'), "it does not begin as an event does"),
        (closed[3].replace(b'"s":3', b'"s":1'), "event 1 stands where event 3 belongs"),
    ]
    for damaged, what in cases:
        assert damaged != closed[3]
        path.write_bytes(b"".join([*closed[:3], damaged, *closed[4:]]))
        assert _found_at(path)[2].startswith(what)
