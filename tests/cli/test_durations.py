"""Lengths of time in words."""

from __future__ import annotations

import pytest

from eventlm.cli.durations import nanoseconds
from eventlm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "ns"),
    [("1.5s", 1_500_000_000), ("0s", 0), ("20ms", 20_000_000), ("0.000000001s", 1), ("2min", 120 * 10**9), ("7ns", 7)],
)
def test_exactly(text: str, ns: int) -> None:
    assert nanoseconds(text, flag="--from") == ns


@pytest.mark.parametrize("text", ["", "5", "s", "1e3s", "-1s", "1 s", "nans"])
def test_not_a_time(text: str) -> None:
    with pytest.raises(UsageError, match=r"--from .*such as 1.5s"):
        nanoseconds(text, flag="--from")
