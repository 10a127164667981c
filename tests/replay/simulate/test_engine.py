"""Policies in a simulation predict what their cost model costs."""

from __future__ import annotations

import pytest

from eventlm.core.predictor import Predictor, StepShape
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.simulate.engine import predictor_for


def test_a_linear_model_is_its_own_predictor() -> None:
    model = LinearCost(
        base_ps=5_000_000_000,
        prefill_ps=40_000_000,
        decode_ps=100_000_000,
        context_ps=20_000,
        chunk_context_ps=1_000,
        ratios_ppm=[500_000, 1_500_000],
    )
    found = predictor_for(model, max_num_batched_tokens=2048, max_num_seqs=256)
    assert found == pytest.approx([5_000_000_000, 40_000_000, 100_000_000, 20_000, 1_000], rel=0.001)


def test_a_gpu_is_predicted_to_within_a_third() -> None:
    model = load_cost_model("h200-llama3-8b")
    predictor = Predictor.from_coefficients(predictor_for(model, max_num_batched_tokens=2048, max_num_seqs=256))
    for shape in (StepShape(0, 32, 32 * 300, 0, 0), StepShape(1024, 0, 1024, 1024 * 512, 1)):
        assert predictor.step_ps(shape) // 1000 == pytest.approx(model.step_ns(shape, 0, 0), rel=0.33)


@pytest.mark.parametrize("name", ["a100-llama3-8b", "h200-llama3-8b", "h200x4-llama3-70b"])
@pytest.mark.parametrize("max_num_batched_tokens", [512, 2048])
def test_long_prompts_are_predicted_to_within_a_sixth(name: str, max_num_batched_tokens: int) -> None:
    """What deadlines are made of: all chunks of a prompt, one after the other."""
    model = load_cost_model(name)
    predictor = Predictor.from_coefficients(
        predictor_for(model, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=256)
    )
    for num_tokens in (2_000, 16_000, 64_000, 120_000):
        taken_ns = 0
        for start in range(0, num_tokens, max_num_batched_tokens):
            chunk = min(max_num_batched_tokens, num_tokens - start)
            shape = StepShape(chunk, 0, start + chunk, chunk * (start + chunk // 2), 1)
            taken_ns += model.step_ns(shape, 0, 0)
        predicted_ns = predictor.prefill_ns(num_tokens, 0, max_num_batched_tokens)
        assert predicted_ns == pytest.approx(taken_ns, rel=1 / 6)


def test_small_limits_leave_few_shapes() -> None:
    found = predictor_for(LinearCost(base_ps=10**10), max_num_batched_tokens=16, max_num_seqs=1)
    assert len(found) == 5
    assert found[0] > 0
