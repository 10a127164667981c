"""Earliest deadline first, against its definition in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.policies.edf import Edf
from tests.policies.views import view

TIMES = st.integers(0, 2**53 - 1)


def expected_key(arrival_ns: int, deadline_ns: int, prefill_ns: int, multiplier: str, min_deadline_ms: str) -> int:
    """a + d, with d = the request's own deadline if it brought one, else max(m * T, d_min), rounded down."""
    if deadline_ns:
        return arrival_ns + deadline_ns
    shortest = int(Fraction(min_deadline_ms) * 10**6)
    return arrival_ns + max(int(Fraction(multiplier) * prefill_ns), shortest)


@given(
    arrival_ns=TIMES,
    deadline_ns=st.one_of(st.just(0), TIMES),
    prefill_ns=TIMES,
    multiplier=st.sampled_from(["1.5", "2", "0.1", "0.000001", "1.333333", "1000"]),
    min_deadline_ms=st.sampled_from(["500", "1", "1.000001", "86400000"]),
    now_ns=TIMES,
)
def test_keys(
    arrival_ns: int, deadline_ns: int, prefill_ns: int, multiplier: str, min_deadline_ms: str, now_ns: int
) -> None:
    edf = Edf(multiplier=float(multiplier), min_deadline_ms=float(min_deadline_ms))
    asked = view(arrival_ns=arrival_ns, deadline_ns=deadline_ns, prefill_ns=prefill_ns)
    wanted = expected_key(arrival_ns, deadline_ns, prefill_ns, multiplier, min_deadline_ms)
    assert edf.keys([asked], now_ns) == [wanted]
    assert type(wanted) is int


def test_defaults() -> None:
    short, long = view(prefill_ns=10**6), view(prefill_ns=10**9)
    assert Edf().keys([short, long], 0) == [500_000_000, 1_500_000_000]
    assert Edf().eviction_margin() == 10_000_000_000
    assert Edf.static is True


def test_the_multiplier_is_applied() -> None:
    # One engine parsed it and never used it.
    asked = view(prefill_ns=10**9)
    keys = [Edf(multiplier=multiplier).keys([asked], 0)[0] for multiplier in (1, 1.5, 2, 20)]
    assert keys == [10**9, 1_500_000_000, 2 * 10**9, 20 * 10**9]


def test_a_year_into_a_run_a_nanosecond_still_decides() -> None:
    # Seconds since the epoch in float32 have a granularity of 128 s; float64 nanoseconds lose the last bits.
    year_ns = 365 * 24 * 3600 * 10**9
    late = [view(arrival_ns=min(year_ns, 2**53 - 2) + offset, deadline_ns=10**6) for offset in (0, 1)]
    first, second = Edf().keys(late, 0)
    assert second - first == 1


def test_half_a_second_is_not_zero() -> None:
    # A budget in whole seconds became 0.
    assert Edf(min_deadline_ms=1.5).keys([view(prefill_ns=0)], 0) == [1_500_000]


@pytest.mark.parametrize("parameters", [
    {"multiplier": -1}, {"multiplier": 0}, {"multiplier": float("nan")}, {"multiplier": float("inf")},
    {"min_deadline_ms": 0}, {"min_deadline_ms": -5}, {"evict_margin_ms": -1}, {"multiplier": "2"}, {"multiplyer": 2},
    {"multiplier": True},
])  # fmt: skip
def test_parameters_are_checked(parameters: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(parameters))):
        resolve("policy", {"type": "edf", **parameters})
