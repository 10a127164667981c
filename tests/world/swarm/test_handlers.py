"""The names of error handlers, and which handlers need not run."""

from __future__ import annotations

from fnmatch import fnmatchcase

from tests.world.swarm.handlers import all_handlers
from tests.world.swarm.unreached import REASONS


def test_handlers_are_named_by_file_function_and_error() -> None:
    assert "eventlm/bus/segment_file.py SegmentFile.close_as except OSError" in all_handlers()


def test_each_that_need_not_run_is_there() -> None:
    patterns = [pattern for each in REASONS.values() for pattern in each]
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in all_handlers())] == []
    assert len(patterns) == len({*patterns})
