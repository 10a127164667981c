"""What first tokens say about prompts."""

from __future__ import annotations

from pathlib import Path

from eventlm.engine.backends.prompt_times import LEAST_TOKENS, MOST_PS, NUM_BETWEEN, PromptTimes
from eventlm.events import PredictorSwapped
from tests.engine.backends.engines import ask, forwarded_request, running_backends
from tests.engine.engines import recorded, verified

MILLISECOND = 1_000_000


def told(times: PromptTimes, taken_ns: int, num_tokens: int = 100) -> list[int]:
    estimates = [times.note(taken_ns, num_tokens) for _ in range(NUM_BETWEEN)]
    return [each for each in estimates if each is not None]


def test_an_estimate_follows_the_quicker_answers() -> None:
    times = PromptTimes(50_000_000)
    for _ in range(NUM_BETWEEN - 2):
        times.note(900 * MILLISECOND, 100)
    times.note(100 * MILLISECOND, 100)
    assert times.note(100 * MILLISECOND, 100) == 9_000_000_000
    assert told(times, 100 * MILLISECOND) == [1_000_000_000]


def test_small_changes_and_short_prompts_tell_nothing() -> None:
    times = PromptTimes(1_000_000_000)
    assert told(times, 110 * MILLISECOND) == []
    assert told(times, 900 * MILLISECOND, LEAST_TOKENS - 1) == []


def test_absurd_times_are_bounded() -> None:
    assert told(PromptTimes(1), 1 << 62, LEAST_TOKENS) == [MOST_PS]


async def test_an_engine_predicts_prompts_by_what_it_has_seen(tmp_path: Path) -> None:
    async with running_backends(record=tmp_path) as (engine, _):
        before = engine._require_engine_core().core.state.replicasets[0].predictor
        for number in range(NUM_BETWEEN):
            await ask(engine, forwarded_request(prompt=range(1000 * number, 1000 * number + 200)))
        assert engine._require_engine_core().core.state.replicasets[0].predictor != before
    [swapped] = [event for event in recorded(engine) if isinstance(event, PredictorSwapped)]
    base, token, *others = swapped.coefficients
    assert (base, others) == (0, [0, 0, 0])
    assert token not in (0, 50_000_000)
    verified(engine)


async def test_what_an_operator_has_said_holds(tmp_path: Path) -> None:
    scheduler = {"predictor": [0, 7_000_000, 0, 0, 0]}
    async with running_backends(record=tmp_path, scheduler=scheduler) as (engine, _):
        for number in range(NUM_BETWEEN):
            await ask(engine, forwarded_request(prompt=range(1000 * number, 1000 * number + 200)))
    assert not [event for event in recorded(engine) if isinstance(event, PredictorSwapped)]
