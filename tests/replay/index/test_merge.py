"""Joining parts: every cut of a run into two gives the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.replay.index.file import IndexContent, read_index
from eventlm.replay.index.index import Index
from eventlm.replay.index.merge import IndexPart, Merger
from eventlm.replay.index.open import open_index
from eventlm.replay.index.segments import PartRequest
from eventlm.replay.index.worker import respond
from tests.replay.index.runs import assert_same


@pytest.mark.parametrize("seed", range(5))
def test_any_number_of_segments_joins(seed: int, random_runs: list[Path], tmp_path: Path) -> None:
    """Parts are made of one segment each, or of several in a row, whose later snapshots are only checked."""
    runs = [path for path in random_runs if len(list(path.glob("trace-*.jsonl"))) > 3]
    run = runs[seed % len(runs)]
    with LogReader(run) as reader:
        segments = reader.segments
    merger = Merger()
    for number in range(len(segments)):
        output = tmp_path / str(number)
        assert respond(PartRequest(segment=str(segments[number]), output=str(output))).is_whole
        content = read_index(output)
        merger.add(IndexPart(content.names, content.tables, content.snapshots))
    joined, whole = merger.merged(), open_index(run, num_jobs=1)
    content = IndexContent(facts=whole.facts, names=joined.names, tables=joined.tables, snapshots=joined.snapshots)
    assert_same(whole, Index(str(run), whole.header, content, whole.rebuilt))
