from __future__ import annotations

from eventlm.errors import ExitCode
from eventlm.replay.expressions.errors import ExpressionError, not_known


def test_an_error_is_one_line_and_points_at_its_column() -> None:
    error = ExpressionError(8, "expected a value", "free < < 5")
    assert str(error) == "column 8 of 'free < < 5': expected a value"
    assert error.pointer == "free < < 5\n       ^"
    assert error.exit_code == ExitCode.USAGE


def test_a_source_is_added_later() -> None:
    error = ExpressionError(2, "expected a value")
    assert str(error) == "column 2: expected a value"
    located = error.located("a <")
    assert (located.column, located.problem, located.source) == (2, "expected a value", "a <")


def test_a_similar_name_is_suggested() -> None:
    assert "did you mean running?" in str(not_known("name", "runing", 1, ["waiting", "running"]))
    assert "there are a, b" in str(not_known("name", "queue", 1, ["b", "a"]))
    assert "20 more" in str(not_known("name", "queue", 1, [f"x{index}" for index in range(40)]))
    assert "none here" in str(not_known("function", "f", 1, []))
