"""Least remaining slack, against its definition in exact integers."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.policies.lrs import Lrs
from tests.policies.views import view

TIMES = st.integers(0, 2**53 - 1)


@given(
    arrival_ns=TIMES,
    deadline_ns=st.one_of(st.just(0), st.integers(1, 2**53 - 1)),
    prefill_ns=TIMES,
    remaining_ns=TIMES,
    now_ns=TIMES,
    multiplier=st.sampled_from(["1.5", "2", "0.1"]),
)
def test_keys(
    arrival_ns: int, deadline_ns: int, prefill_ns: int, remaining_ns: int, now_ns: int, multiplier: str
) -> None:
    d = deadline_ns or max(int(Fraction(multiplier) * prefill_ns), 500_000_000)
    wanted = floor(Fraction(arrival_ns + d - now_ns - remaining_ns, d) * 2**20)
    asked = view(arrival_ns=arrival_ns, deadline_ns=deadline_ns, prefill_ns=prefill_ns, remaining_ns=remaining_ns)
    assert Lrs(multiplier=float(multiplier)).keys([asked], now_ns) == [wanted]


def test_the_order_changes_with_time_alone() -> None:
    # Who has the shorter deadline loses its share of slack faster.
    patient, hurried = view(arrival_ns=0, deadline_ns=4 * 10**9), view(arrival_ns=10**9, deadline_ns=2 * 10**9)
    at_once = Lrs().keys([patient, hurried], 10**9)
    later = Lrs().keys([patient, hurried], 3 * 10**9 - 10**7)
    assert at_once[0] < at_once[1]
    assert later[0] > later[1]
    assert Lrs.static is False


def test_work_done_gives_slack() -> None:
    fresh, half_done = view(deadline_ns=10**9), view(deadline_ns=10**9, remaining_ns=5_000_000)
    first, second = Lrs().keys([fresh, half_done], 0)
    assert first < second


def test_the_margin_is_in_deadlines() -> None:
    assert Lrs().eviction_margin() == 8 * 2**20
    assert Lrs(evict_margin=0.5).eviction_margin() == 2**19


@pytest.mark.parametrize("parameters", [
    {"multiplier": 0}, {"multiplier": -2}, {"min_deadline_ms": 0.5}, {"evict_margin": -1}, {"evict_margin": "far"},
])  # fmt: skip
def test_parameters_are_checked(parameters: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(parameters))):
        resolve("policy", {"type": "lrs", **parameters})
