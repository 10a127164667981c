"""What Tab offers."""

from __future__ import annotations

import pytest

from eventlm.replay.debugger.completion import complete


@pytest.mark.parametrize(
    ("text", "num_chars", "expected"),
    [
        ("wa", 2, ["watch"]),
        ("show qu", 2, ["queue"]),
        ("s pl", 2, ["plan"]),
        ("next 5 dr", 2, ["drain"]),
        ("goto request 17 pre", 3, ["preempt"]),
        ("help wh", 2, ["why"]),
        ("find fre", 3, ["free"]),
        ("f running > 3 and oldest", 6, ["oldest_wait"]),
        ('find event == "pree', 4, ['preempt"']),
        ("break req(17).ski", 3, ["skips"]),
        ("watch replica(0).nex", 3, ["next_step"]),
        ("bogus x", 0, []),
        ("find zzz", 3, []),
        ("branch --pol", 5, ["--policy"]),
        ("story 17 w", 1, ["whole"]),
    ],
)
def test_completions(text: str, num_chars: int, expected: list[str]) -> None:
    assert complete(text) == (num_chars, expected)


def test_an_empty_line_offers_all_commands() -> None:
    assert {"next", "back", "goto", "quit"} <= set(complete("").words)
    assert "free" in complete("find ").words
