from __future__ import annotations

import threading

import pytest

from eventlm.replay.pool.pool import ProcessPool
from tests.replay.pool.echo import Answer, Word


def _pool(num_jobs: int) -> ProcessPool[Word, Answer]:
    return ProcessPool("tests.replay.pool.echo", Answer, lambda error: Answer(error=error), num_jobs=num_jobs)


def _run(pool: ProcessPool[Word, Answer], *texts: str) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    pool.run([Word(text) for text in texts], lambda spec, result: found.update({spec.text: result}))
    return found


def test_processes_live_on_and_end_with_the_block() -> None:
    with _pool(2) as pool:
        first = _run(pool, "a", "b", "c", "d")
        second = _run(pool, "e")
        assert [first[text].text for text in "abcd"] == ["a", "b", "c", "d"]
        assert 1 <= len({answer.pid for answer in first.values()}) <= 2
        assert second["e"].pid in {answer.pid for answer in first.values()}
        assert _run(pool) == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "eventlm-pool"]


def test_a_process_that_dies_fails_its_own_and_is_replaced() -> None:
    with _pool(1) as pool:
        found = _run(pool, "a", "die", "b")
    assert found["die"].error == "its process died (exit code 7): a last word"
    assert found["a"].pid not in (0, found["b"].pid)
    assert found["b"].text == "b"


def test_each_death_is_told_by_its_own_last_words() -> None:
    with _pool(1) as pool:
        for _ in range(3):
            assert _run(pool, "die")["die"].error == "its process died (exit code 7): a last word"


def test_what_does_not_end_in_time_is_killed() -> None:
    found: list[str] = []
    with _pool(2) as pool:
        with pytest.raises(TimeoutError):
            pool.run(
                [Word("a"), Word("wait"), Word("wait"), Word("b")], lambda spec, _: found.append(spec.text), timeout_s=2
            )
        assert found == ["a"]
        assert not [thread for thread in threading.enumerate() if thread.name == "eventlm-pool"]
        # Nothing of it is left for the next.
        assert _run(pool, "c")["c"].text == "c"
