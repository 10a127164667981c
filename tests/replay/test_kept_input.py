from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.errors import UsageError
from eventlm.replay.kept_input import check_keeps_input


def test_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    trace = run / "trace.jsonl"
    trace.write_text("recorded")
    (tmp_path / "link").symlink_to(trace)
    (tmp_path / "other").write_text("recorded")
    for output in (trace, run / ".." / "run" / "trace.jsonl", tmp_path / "link"):
        for read in (trace, run):
            with pytest.raises(UsageError, match=r"^--test .* would replace what is read from .*; choose another file"):
                check_keeps_input(output, read, flag="--test")
    for output in (tmp_path / "other", tmp_path / "none", run / "none"):
        check_keeps_input(output, run)
        check_keeps_input(output, trace)


def test_the_segments_of_a_run_are_kept_together(tmp_path: Path) -> None:
    for name in ("trace-000000000000.jsonl", "trace-000000000700.jsonl", "trace.jsonl", "tokens.jsonl", "small.jsonl"):
        (tmp_path / name).write_text("recorded")
    (tmp_path / "link").symlink_to(tmp_path / "trace-000000000000.jsonl")
    for read in ("trace-000000000700.jsonl", "trace.jsonl", "link"):
        for output in ("trace-000000000000.jsonl", "trace.jsonl", "tokens.jsonl"):
            with pytest.raises(UsageError, match="would replace"):
                check_keeps_input(tmp_path / output, tmp_path / read)
        check_keeps_input(tmp_path / "small.jsonl", tmp_path / read)
    check_keeps_input(tmp_path / "trace.jsonl", tmp_path / "small.jsonl")
