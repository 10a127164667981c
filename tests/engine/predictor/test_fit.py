"""The fit of the predictor's coefficients, against steps whose coefficients are known."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from eventlm.core.predictor import DEFAULT_COEFFICIENTS, NUM_COEFFICIENTS, Predictor, StepShape
from eventlm.engine.predictor.fit import fit
from eventlm.worker.fake.model import fake_samples
from eventlm.worker.fake.tokens import FakeParameters
from eventlm.worker.protocol import StepSample


def step_ns(predictor: Predictor, sample: StepSample) -> int:
    return predictor.step_ps(sample.shape) // 1000


def samples_of(coefficients: list[int], *, noise: float = 0.0, count: int = 40) -> list[StepSample]:
    rng = random.Random(3)
    predictor = Predictor.from_coefficients(coefficients)
    found = []
    for _ in range(count):
        prefill, decodes = rng.choice([0, 16, 256, 1024]), rng.randrange(64)
        context_tokens = prefill + decodes * rng.randrange(1, 500)
        shape = StepShape(prefill, decodes, context_tokens, chunk_context=prefill * rng.randrange(1, 2000))
        duration_ns = round(predictor.step_ps(shape) // 1000 * (1 + rng.uniform(-noise, noise)))
        found.append(StepSample(shape=shape, duration_ns=duration_ns))
    return found


@pytest.mark.parametrize(
    "coefficients",
    [
        list(DEFAULT_COEFFICIENTS),
        [5_000_000_000, 0, 700_000_000, 0, 90_000],
        [0, 3_000_000, 0, 40_000, 0],
    ],
)
def test_exact_samples_give_their_coefficients_back(coefficients: list[int]) -> None:
    found = fit(samples_of(coefficients))
    assert all(abs(a - b) <= 1 + b * 1e-6 + 1e-6 * max(coefficients) for a, b in zip(found, coefficients, strict=True))


def test_noisy_samples_are_predicted_within_their_noise() -> None:
    samples = samples_of(list(DEFAULT_COEFFICIENTS), noise=0.1)
    predictor = Predictor.from_coefficients(fit(samples))
    errors = [abs(step_ns(predictor, sample) / sample.duration_ns - 1) for sample in samples]
    assert sum(errors) / len(errors) < 0.08


def test_no_coefficient_is_negative() -> None:
    # Longer contexts take less time: nothing that the model can say.
    samples = [
        StepSample(shape=StepShape(num_decodes=n, context_tokens=n * n * 100), duration_ns=10**8 // n)
        for n in (1, 2, 4, 8, 16, 32)
    ]
    found = fit(samples)
    assert min(found) == 0 < max(found)
    Predictor.from_coefficients(found)


@pytest.mark.parametrize("column", ["prefill_tokens", "num_decodes", "context_tokens", "chunk_context"])
def test_a_feature_that_no_sample_has_gets_no_weight(column: str) -> None:
    samples = []
    for number, sample in enumerate(samples_of(list(DEFAULT_COEFFICIENTS))):
        samples.append(StepSample(shape=structs.replace(sample.shape, **{column: 0}), duration_ns=10**6 + number))
    assert fit(samples)[1 + ["prefill_tokens", "num_decodes", "context_tokens", "chunk_context"].index(column)] == 0


def test_without_samples_the_defaults_are_all_there_is() -> None:
    assert fit([]) == list(DEFAULT_COEFFICIENTS)


@pytest.mark.parametrize("count", range(1, NUM_COEFFICIENTS))
def test_few_samples_say_how_fast_the_machine_is(count: int) -> None:
    slow = [coefficient * 50 for coefficient in DEFAULT_COEFFICIENTS]
    assert fit(samples_of(slow, count=count)) == pytest.approx(slow, rel=1e-6)


def test_the_fake_worker_s_own_samples_are_predicted() -> None:
    samples = fake_samples(FakeParameters())
    predictor = Predictor.from_coefficients(fit(samples))
    assert all(abs(step_ns(predictor, sample) / sample.duration_ns - 1) < 0.001 for sample in samples)


@pytest.mark.parametrize("count", [3, 6])
def test_steps_that_take_no_time_are_predicted_to_take_hardly_any(count: int) -> None:
    nothing = FakeParameters(base_ns=0, prefill_token_ns=0, decode_ns=0, context_token_ns=0)
    samples = fake_samples(nothing)[:count]
    predictor = Predictor.from_coefficients(fit(samples))
    assert max(step_ns(predictor, sample) for sample in samples) <= 10


def test_steps_that_take_no_time_leave_the_others_theirs() -> None:
    samples = fake_samples(FakeParameters(base_ns=0, prefill_token_ns=10_000, decode_ns=0, context_token_ns=0))
    predictor = Predictor.from_coefficients(fit(samples))
    for sample in samples:
        assert abs(step_ns(predictor, sample) - sample.duration_ns) <= max(0.01 * sample.duration_ns, 10)
