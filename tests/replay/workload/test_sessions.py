"""Who goes on from whom: told by the session, or by a prompt that holds what was generated."""

from __future__ import annotations

from typing import Any

from eventlm.events import Arrived
from eventlm.replay.workload.sessions import find_parents
from tests.made_requests import make_arrival


def arrival(ts: int, blocks: list[int] | None = None, **fields: Any) -> Arrived:
    return make_arrival(ts=ts, prompt_tokens=64, max_tokens=8, blocks=blocks or [], **fields)


def test_a_turn_follows_the_latest_of_its_session_that_had_ended() -> None:
    arrivals = [arrival(0, session=1), arrival(5, session=2), arrival(20, session=1), arrival(40, session=1)]
    assert find_parents(arrivals, [10, 100, 60, 90], [[]] * 4) == [-1, -1, 0, 0]


def test_a_session_as_long_as_the_run_is_read_once() -> None:
    """Each request looks at those of its session that have not ended, and at one that has."""

    class Ends(list[int]):
        num_looks = 0

        def __getitem__(self, place: Any) -> Any:
            self.num_looks += 1
            return super().__getitem__(place)

    arrivals = [arrival(10 * place, session=1) for place in range(1000)]
    ends = Ends(10 * place + 15 for place in range(1000))
    assert find_parents(arrivals, ends, [[]] * 1000) == [-1, -1, *range(998)]
    assert ends.num_looks < 5000


def test_a_prompt_that_holds_an_output_follows_it() -> None:
    arrivals = [arrival(0, [1, 2]), arrival(20, [1, 2, 3, 4]), arrival(50, [1, 2, 3, 4, 5])]
    assert find_parents(arrivals, [10, 40, 60], [[3], [5], []]) == [-1, 0, 1]


def test_a_shared_beginning_shows_nothing() -> None:
    arrivals = [arrival(0, [1, 2]), arrival(20, [1, 2, 7]), arrival(30, [1, 2])]
    assert find_parents(arrivals, [10, 25, 40], [[3], [8], []]) == [-1, -1, -1]


def test_no_turn_follows_one_that_had_not_ended() -> None:
    arrivals = [arrival(0, [1]), arrival(5, [1, 2]), arrival(9, session=1), arrival(10, session=1)]
    assert find_parents(arrivals, [10, 20, -1, 30], [[2], [], [], []]) == [-1, -1, -1, -1]


def test_a_group_goes_on_from_what_its_first_member_does() -> None:
    arrivals = [arrival(0, [1]), *(arrival(20, [1, 2], group_size=2, group_index=index) for index in range(2))]
    assert find_parents(arrivals, [10, 30, 30], [[2], [], []]) == [-1, 0, -1]


def test_a_session_that_is_named_is_not_guessed() -> None:
    arrivals = [arrival(0, [1]), arrival(20, [1, 2], session=4)]
    assert find_parents(arrivals, [10, 30], [[2], []]) == [-1, -1]
