"""Workload files come back as they were written; what is wrong in one is named by its line."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path

import pytest

from eventlm.bench.input_files import read_arrivals
from eventlm.errors import UsageError
from eventlm.replay.workload.file import WorkloadHeader, WorkloadLine, read_workload, write_workload
from eventlm.replay.workload.workload import NEVER

HEADER = '{"t":"workload","format":1,"source":"test","block_size":16}'
LINES = [
    WorkloadLine(arrival_s=Decimal("0.1234567"), prompt_tokens=40, output_tokens=3, blocks=[7, 8]),
    WorkloadLine(arrival_s=Decimal("3999999.000000001"), prompt_tokens=50, output_tokens=2, max_tokens=9, parent=0),
]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    size = write_workload(path, WorkloadHeader(source="test", block_size=16), LINES)
    assert (size.num_requests, size.num_bytes) == (2, path.stat().st_size)
    found = read_workload(path)
    assert (found.source, found.block_size, found.first_free_name) == ("test", 16, 10)
    assert found.requests[0].arrival.blocks == [8, 9]
    first, second = found.requests
    assert (first.arrival_ns, second.arrival_ns) == (123_456_700, 3_999_999_000_000_001)
    assert (first.arrival.max_tokens, first.outputs[0].worker_end) == (3, NEVER)
    assert (second.arrival.max_tokens, second.outputs[0].worker_end) == (9, 2)
    assert (first.parent, second.parent, second.think_ns) == (-1, 0, None)
    assert not list(tmp_path.glob(".*"))


def test_a_load_test_reads_it_too(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    write_workload(path, WorkloadHeader(), LINES[:1])
    (arrival,) = read_arrivals(str(path))
    assert (arrival.prompt_tokens, arrival.output_tokens) == (40, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a workload file"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "eventlm trace import"),
        ('{"t":"header","s":0}\n', "not a workload file"),
        ('{"t":"workload","format":2}\n{}', "format 2, this version reads 1"),
        (HEADER, "no request"),
        (HEADER + '\n{"arrival_s":0,"prompt_tokens":0,"output_tokens":1}', ":2: .*prompt_tokens"),
        (HEADER + '\n{"arrival_s":0,"prompt_tokens":1,"output_tokens":1,"x":1}', ":2: .*unknown field `x`"),
        (HEADER + '\n{"arrival_s":-1,"prompt_tokens":1,"output_tokens":1}', ":2: a time must lie between"),
        (HEADER + '\n{"arrival_s":1e99,"prompt_tokens":1,"output_tokens":1}', ":2: a time must lie between"),
        (HEADER + '\n\n{"arrival_s":0,"prompt_tokens":1,"outp', ":3: "),
        (
            HEADER + '\n{"arrival_s":2,"prompt_tokens":1,"output_tokens":1}\n'
            '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1}',
            ":3: it arrives before",
        ),
        (HEADER + '\n{"arrival_s":2,"prompt_tokens":1,"output_tokens":1,"parent":0}', ":2: its parent 0"),
        (HEADER + '\n\n{"arrival_s":2,"prompt_tokens":1,"output_tokens":1,"parent":0}', ":3: its parent 0"),
        (
            HEADER.replace("16", "0") + '\n{"arrival_s":0,"prompt_tokens":9,"output_tokens":1,"blocks":[1]}',
            ":2: it has blocks, but the first line has no block_size",
        ),
        (HEADER + '\n{"arrival_s":0,"prompt_tokens":1,"output_tokens":1,"priority":1e99}', ":2: .*priority"),
        (HEADER + '\n{"arrival_s":0,"prompt_tokens":1,"output_tokens":1,"deadline_ms":9999999999}', ":2: .*deadline"),
        (HEADER.replace("test", "\udcff"), "not a workload file"),
        (HEADER + '\n{"arrival_s":"NaN","prompt_tokens":1,"output_tokens":1}', ":2: a time must lie between"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=words):
        read_workload(path)


def test_a_link_stays_and_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    link, target, pipe = tmp_path / "link", tmp_path / "target", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_workload(link, WorkloadHeader(block_size=16), LINES)
    assert link.is_symlink()
    assert len(read_workload(target).requests) == 2
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(UsageError, match="it is not a file"):
            write_workload(path, WorkloadHeader(), LINES)
    assert pipe.is_fifo()


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the workload"):
        read_workload(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="cannot write the workload"):
        write_workload(tmp_path / "none" / "w.jsonl", WorkloadHeader(), [])
