"""The fake worker: its tokens depend on the request alone, and it can do all that a real worker may do."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.sampling_params import SamplingParams
from eventlm.worker.fake.runner import FakeDeath, FakeRunner
from eventlm.worker.fake.tokens import (
    ENDS,
    EOS_TOKEN_ID,
    MILLION,
    FakeParameters,
    draw,
    fake_token,
    poisoned_place,
)
from eventlm.worker.protocol import StepOutput
from eventlm.worker.sequence_table import DesyncError
from tests.worker.launches import launched, new_sequence, payload

PARAMS = SamplingParams(seed=9, ignore_eos=True)


def make_runner(*, epoch: int = 1, **parameters: Any) -> FakeRunner:
    return FakeRunner(parameters, epoch=epoch, block_size=4, num_blocks=64)


def prefill(runner: FakeRunner, *, params: SamplingParams = PARAMS, step: int = 0, request: int = 1) -> StepOutput:
    launch = launched(step, chunks=[(request, 0, 0, 3, 1)], blocks=[(0, 0, list(range(32)))])
    return runner.execute(launch, payload(new_sequence(request, [1, 2, 3], params=params)))


def decode(runner: FakeRunner, step: int, length: int, *, most: int | None = None, request: int = 1) -> StepOutput:
    launch = launched(step, decodes=[(request, 0, length, 0)])
    return runner.execute(structs.replace(launch, most=[most]) if most is not None else launch, payload())


def test_tokens_are_those_of_the_request_whatever_batch_epoch_or_history_it_has() -> None:
    runner, tokens = make_runner(), []
    tokens += prefill(runner).tokens[0]
    for step in range(1, 10):
        tokens += decode(runner, step, 2 + len(tokens) + 1).tokens[0]
    assert tokens == [fake_token(9, 0, position) for position in range(10)]
    other = make_runner(epoch=7)
    history = [1, 2, 3, *tokens[:4]]
    step = other.execute(
        launched(0, chunks=[(5, 0, 0, 7, 1)], blocks=[(0, 0, [3, 1])]),
        payload(new_sequence(5, history, num_prompt_tokens=3, params=PARAMS)),
    )
    assert step.tokens == [[tokens[4]]]


def test_a_chunk_that_does_not_sample_produces_nothing() -> None:
    runner = make_runner()
    launch = launched(0, chunks=[(1, 0, 0, 2, 0)], blocks=[(0, 0, [1])])
    assert runner.execute(launch, payload(new_sequence(1, [1, 2, 3], params=PARAMS))).tokens == [[]]


def test_a_row_of_several_tokens_produces_between_none_and_all() -> None:
    counts, runner, tokens = set(), make_runner(), prefill(make_runner()).tokens[0]
    prefill(runner)
    for step in range(1, 40):
        produced = decode(runner, step, 3 + len(tokens), most=3).tokens[0]
        counts.add(len(produced))
        tokens += produced
    assert counts == {0, 1, 2, 3}
    assert tokens == [fake_token(9, 0, position) for position in range(len(tokens))]


def test_ends_of_every_reason_are_drawn_and_cut_the_row() -> None:
    reasons = set()
    for seed in range(60):
        runner = make_runner(end_ppm=400_000)
        params = SamplingParams(seed=seed)
        length = 3
        for step in range(20):
            done = prefill(runner, params=params) if step == 0 else decode(runner, step, length, most=4)
            length += len(done.tokens[0])
            if done.ends:
                [(row, reason)] = done.ends
                assert row == 0
                assert done.tokens[0][-1] == EOS_TOKEN_ID
                reasons.add(reason)
                break
    assert reasons == set(ENDS)


def test_ends_of_the_request_s_own() -> None:
    first = fake_token(9, 0, 0)
    eos = SamplingParams(seed=9, eos_token_ids=(first,))
    assert prefill(make_runner(), params=eos).ends == [(0, "eos")]
    assert prefill(make_runner(), params=structs.replace(eos, ignore_eos=True)).ends == []
    assert prefill(make_runner(), params=SamplingParams(seed=9, stop_token_ids=(first,))).ends == [(0, "stop_token")]
    assert prefill(make_runner(end_ppm=1_000_000), params=PARAMS).ends == []


def test_nothing_ends_before_min_tokens_and_the_tokens_stay_as_they_are() -> None:
    first = fake_token(9, 0, 0)
    params = SamplingParams(seed=9, stop_token_ids=(first,), min_tokens=1)
    done = prefill(make_runner(), params=params)
    assert (done.tokens, done.ends) == ([[first]], [])
    assert prefill(make_runner(end_ppm=1_000_000), params=params).tokens == [[first]]
    runner = make_runner(end_ppm=1_000_000)
    prefill(runner, params=params)
    assert decode(runner, 1, 4).tokens == [[EOS_TOKEN_ID]]


def test_parameters_that_shape_a_distribution_change_nothing() -> None:
    shaped = structs.replace(
        PARAMS, allowed_token_ids=(1, 2), bad_words_token_ids=((1,), (2, 3)), logit_bias={4: 1.0}, min_p=0.5, top_k=3
    )
    assert prefill(make_runner(), params=shaped).tokens == prefill(make_runner()).tokens


def test_times_follow_the_formula_and_are_late_by_chance() -> None:
    times = {"base_ns": 1000, "prefill_token_ns": 10, "decode_ns": 200, "context_token_ns": 3}
    runner = make_runner(**times)
    assert sum(prefill(runner).ops.values()) == 1000 + 3 * 10 + 3 * 3
    assert prefill(make_runner(**times)).ops == {"base": 1000, "prefill": 30, "decode": 0, "context": 9}
    assert sum(decode(runner, 1, 4).ops.values()) == 1000 + 200 + 4 * 3
    assert sum(prefill(make_runner(**times, late_ppm=1_000_000, late_factor=5)).ops.values()) == 5 * (1000 + 30 + 9)


def test_death_is_drawn_by_epoch_replica_and_step() -> None:
    def fate(epoch: int) -> list[bool]:
        died = []
        for step in range(30):
            try:
                prefill(make_runner(epoch=epoch, die_ppm=300_000), step=step)
                died.append(False)
            except FakeDeath:
                died.append(True)
        return died

    assert fate(1) == fate(1) != fate(2)
    assert 2 < sum(fate(1)) < 20


def test_it_disagrees_like_a_real_worker() -> None:
    runner = make_runner()
    prefill(runner)
    with pytest.raises(DesyncError, match="1/0"):
        decode(runner, 1, 9)


def test_draws_are_64_bits_of_all_their_parts() -> None:
    drawn = {draw("a", 1, 2), draw("a", 12), draw("a", 2, 1), draw("b", 1, 2)}
    assert len(drawn) == 4
    assert max(drawn).bit_length() > 56


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="speed"):
        make_runner(speed=3)


def test_a_sequence_may_have_logits_that_are_not_finite() -> None:
    runner = make_runner(nan_ppm=200_000)
    step = prefill(runner)
    number = 0
    while not step.ends:
        assert step.tokens == [[fake_token(9, 0, number)]]
        number += 1
        step = decode(runner, number, 3 + number)
    assert number > 0
    assert (step.tokens, step.ends) == ([[]], [(0, "error")])


def test_a_poisoned_sequence_kills_at_its_place_in_every_epoch() -> None:
    parameters = {"poison_ppm": MILLION}
    index = poisoned_place(FakeParameters(**parameters), 9, 0)
    assert index
    assert poisoned_place(FakeParameters(), 9, 0) is None
    for epoch in (1, 2):
        runner = make_runner(epoch=epoch, **parameters)
        prefill(runner)
        for step in range(1, index):
            decode(runner, step, 3 + step)
        with pytest.raises(FakeDeath, match="poisoned by sequence"):
            decode(runner, index, 3 + index)
