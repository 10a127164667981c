"""Models of other servers find what made the times that they are fitted to."""

from __future__ import annotations

import random

import numpy as np
import pytest

from eventlm.errors import UsageError
from eventlm.events import ForwardFailed
from eventlm.replay.cost.fit_backends import MIN_ANSWERS, fit_backends, solve
from eventlm.replay.cost.recorded_forwards import RecordedForward

MILLISECOND = 1_000_000


def made(
    count: int, *, replica: int = 0, kind: str = "vllm", seed: int = 1, token_ns: int = 50_000, noise: float = 0.02
) -> list[RecordedForward]:
    """Answers of a server whose first token takes 5 ms and so much for each token of the prompt, one prompt after the
    other, and further ones 10 ms and 1 ms for each other answer.
    """
    rng = random.Random(seed)
    found = []
    now_ns, free_ns = 0, 0.0
    for _ in range(count):
        now_ns += rng.randrange(5, 60) * MILLISECOND
        prompt_tokens, num_running, num_tokens = rng.randrange(50, 900), rng.randrange(6), rng.randrange(2, 40)
        waits_ns = max(free_ns - now_ns, 0)
        free_ns = now_ns + waits_ns + token_ns * prompt_tokens
        first_ns = round((5 * MILLISECOND + waits_ns + token_ns * prompt_tokens) * rng.gauss(1, noise))
        others = rng.random() * 5
        taken_ns = round((num_tokens - 1) * (10 + others) * MILLISECOND * rng.gauss(1, noise))
        found.append(
            RecordedForward(
                replica=replica,
                name=f"server-{replica}",
                kind=kind,
                all_tokens=prompt_tokens,
                prompt_tokens=prompt_tokens,
                num_ahead=num_running,
                num_running=num_running,
                sent_ns=now_ns,
                first_ns=now_ns + first_ns,
                last_ns=now_ns + first_ns + taken_ns,
                ended_ns=now_ns + first_ns + taken_ns + 2 * MILLISECOND,
                num_first=1,
                num_tokens=num_tokens,
                running_ns=round(taken_ns * (1 + others)),
            )
        )
    return found


def test_it_finds_what_made_the_times() -> None:
    [cost] = fit_backends(made(300), {}).model.backends
    assert cost.prefill_ps == pytest.approx(50_000_000, rel=0.05)
    assert cost.queued_ppm == pytest.approx(1_000_000, rel=0.1)
    assert cost.token_ps == pytest.approx(10_000_000_000, rel=0.05)
    assert cost.token_running_ps == pytest.approx(1_000_000_000, rel=0.1)
    assert cost.end_ns == 2 * MILLISECOND
    assert cost.first_ns < 10 * MILLISECOND


def test_a_few_stalls_bend_nothing() -> None:
    forwards = made(300)
    for each in forwards[::30]:
        each.first_ns += 2_000 * MILLISECOND
        each.last_ns += 2_000 * MILLISECOND
        each.ended_ns += 2_000 * MILLISECOND
    [cost] = fit_backends(forwards, {}).model.backends
    assert cost.prefill_ps == pytest.approx(50_000_000, rel=0.15)
    assert max(cost.first_ratios_ppm) > 10_000_000


def test_a_server_with_few_answers_is_as_those_of_its_kind() -> None:
    forwards = [
        *made(200, replica=0, token_ns=50_000),
        *made(200, replica=1, kind="llamacpp", token_ns=400_000, seed=2),
        *made(MIN_ANSWERS // 3, replica=3, kind="llamacpp", token_ns=400_000, seed=3),
    ]
    fitted = fit_backends(forwards, {3: 4})
    first, second, never, few = fitted.model.backends
    assert first.prefill_ps < 60_000_000 < 300_000_000 < second.prefill_ps
    assert few.prefill_ps == pytest.approx(400_000_000, rel=0.2)
    assert (few.name, few.kind, few.slots, second.slots) == ("server-3", "llamacpp", 4, 0)
    assert never.token_ps > 1
    assert (fitted.report.num_servers, fitted.report.num_pooled) == (3, 1)
    assert fitted.report.first.median < 0.2


def test_attempts_that_waited_for_a_slot_do_not_count() -> None:
    forwards = made(200)
    for each in forwards[::2]:
        each.num_ahead = 9
        each.first_ns += 5_000 * MILLISECOND
    [cost] = fit_backends(forwards, {0: 8}).model.backends
    assert cost.prefill_ps == pytest.approx(50_000_000, rel=0.15)


def test_failures_have_their_rates() -> None:
    forwards = made(80)
    for number, each in enumerate(forwards[:20]):
        kind = "server" if number < 16 else "overloaded"
        each.failure = ForwardFailed(
            request=1, index=0, attempt=1, kind=kind, status=500 if number < 16 else 429, retry_after_ns=7
        )  # type: ignore[arg-type]
        each.ended_ns = each.sent_ns + 3 * MILLISECOND
        if number % 2:
            each.first_ns = each.last_ns = -1
    [cost] = fit_backends(forwards, {}).model.backends
    server, overloaded = cost.failures
    assert (server.kind, server.rate_ppm, server.status) == ("server", 200_000, 500)
    assert (server.delay_ns, server.begun_ppm, server.can_continue) == (3 * MILLISECOND, 500_000, False)
    assert (overloaded.rate_ppm, overloaded.retry_after_ns) == (50_000, 7)


def test_draws_are_of_resamples() -> None:
    first, *others = fit_backends(made(100, noise=0.3), {}, num_draws=4).draws
    assert [each.seed for each in (first, *others)] == [0, 1, 2, 3]
    assert len({each.backends[0].prefill_ps for each in (first, *others)}) >= 3
    assert first == fit_backends(made(100, noise=0.3), {}).model


def test_without_an_answer_there_is_nothing_to_fit_to() -> None:
    [unanswered] = made(1)
    unanswered.ended_ns = -1
    with pytest.raises(UsageError, match="no answer of a backend is complete"):
        fit_backends([unanswered], {})


def test_no_coefficient_is_negative() -> None:
    features = np.array([[1.0, n] for n in range(1, 30)])
    assert solve(features, np.array([100.0 - n for n in range(1, 30)])) == pytest.approx([85, 0], rel=0.1)


def test_what_the_backends_tell_of_their_caches_is_told() -> None:
    forwards = made(50)
    assert "do not tell" in fit_backends(forwards, {}).report.notes[0]
    for each in forwards:
        each.told_tokens, each.told_cached, each.all_tokens = 100, 40, 2 * each.prompt_tokens
    assert (
        "found 40% of the prompts' tokens in their caches, and the scheduler took them to find 50%"
        in (fit_backends(forwards, {}).report.notes[0])
    )
