"""Attempts in a gateway's log that break a rule are found."""

from __future__ import annotations

import pytest

from eventlm.config.structs import GatewayConfig
from eventlm.events import Event, Forwarded, ForwardFailed, Relayed, Streamed, Withdrawn
from tests.world.invariants.attempts import Attempts
from tests.world.invariants.checks import BrokenInvariant, Checks


class _Arrivals(Attempts):
    """The arrivals of requests without deadlines."""

    def _deadline_ns(self, request: int) -> int:
        return 0


def _forwarded(attempt: int, *, request: int = 5, is_hedge: bool = False) -> Forwarded:
    return Forwarded(request=request, index=0, replica=attempt, attempt=attempt, running=1, limit=1, hedge=is_hedge)


def _shown(attempt: int, num_tokens: int, *, dropped: tuple[int, ...] = ()) -> list[Event]:
    return [Streamed(rows=[(5, 0, attempt, num_tokens)]), Relayed(num_tokens=1, dropped=[*dropped])]


_FAILED = ForwardFailed(request=5, index=0, attempt=1, kind="broken")


def _take(events: list[Event]) -> None:
    attempts = _Arrivals(Checks(), GatewayConfig(forward_retries=1, retry_budget_percent=0))
    for event in events:
        attempts.take(event)


def test_an_answer_that_another_backend_continues_and_a_hedge_that_loses() -> None:
    withdrawn = Withdrawn(request=5, index=0, replica=2, attempt=2)
    lost = [_forwarded(1), _forwarded(2, is_hedge=True), *_shown(1, 2), withdrawn, *_shown(2, 3, dropped=(0,))]
    _take([*lost, *_shown(1, 4), _FAILED, _forwarded(3), *_shown(3, 5)])


@pytest.mark.parametrize(
    ("name", "events"),
    [
        ("attempts are few", [_forwarded(1), _FAILED, _forwarded(2), _FAILED, _forwarded(3)]),
        ("one attempt at once except hedges", [_forwarded(1), _forwarded(2)]),
        (
            "a hedge is the second attempt at once",
            [_forwarded(1), *[_forwarded(each, is_hedge=True) for each in (2, 3)]],
        ),
        ("hedges are of requests without output", [_forwarded(1), *_shown(1, 2), _forwarded(2, is_hedge=True)]),
        ("one attempt at a time is shown", [_forwarded(1), _forwarded(2, is_hedge=True), *_shown(1, 2), *_shown(2, 3)]),
        ("tokens are shown once", [_forwarded(1), *_shown(1, 2), *_shown(1, 1)]),
    ],
)
def test_what_breaks_a_rule_is_found(name: str, events: list[Event]) -> None:
    with pytest.raises(BrokenInvariant) as found:
        _take(events)
    assert found.value.name == name


def test_hedges_beyond_the_budget_are_found() -> None:
    both = [[_forwarded(1, request=each), _forwarded(2, request=each, is_hedge=True)] for each in range(20)]
    with pytest.raises(BrokenInvariant, match="retries keep to their budget"):
        _take([event for each in both for event in each])
