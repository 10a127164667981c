"""Which numbers of backends are taken for counts."""

from __future__ import annotations

import pytest

from eventlm.gateway.counts import MOST, count_of


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (0, 0),
        (3.6, 4),
        (10**400, MOST),
        (float("inf"), MOST),
        (float("nan"), -1),
        (-1, -1),
        (-0.5, -1),
        (None, -1),
    ],
)
def test_counts(value: float | None, count: int) -> None:
    assert count_of(value) == count
    assert count_of(value, unknown=0) == max(count, 0)
