"""The roofline against published figures, within what its assumptions can promise."""

from __future__ import annotations

import msgspec
import pytest

from eventlm.core.predictor import StepShape
from eventlm.replay.cost.files import built_in_cost_models, load_cost_model
from eventlm.replay.cost.roofline import Dimensions, RooflineCost


def step_ms(name: str, shape: StepShape) -> float:
    return load_cost_model(name).step_ns(shape, 0, 0) / 1e6


def decodes(count: int, context: int) -> StepShape:
    return StepShape(0, count, count * context, 0, 0)


def prompt(num_tokens: int) -> StepShape:
    return StepShape(num_tokens, 0, num_tokens, num_tokens * (num_tokens // 2), 1)


@pytest.mark.parametrize(
    ("name", "shape", "lowest_ms", "highest_ms"),
    [
        # gpt-fast's README: 104.9 tokens/s for Llama-2-7B at batch 1 on an A100, 1,397 GB/s; 8B reads 15.0 GB.
        ("a100-llama3-8b", decodes(1, 64), 9.0, 12.5),
        # Vidur's profile of the layers without attention: 9.8, 13.3, 34.9 and 142.6 ms at 1, 128, 512 and 2,048 tokens.
        ("a100-llama3-8b", prompt(128), 13.0, 16.5),
        ("a100-llama3-8b", prompt(512), 34.0, 42.0),
        ("a100-llama3-8b", prompt(2048), 140.0, 170.0),
        # The same profile of Llama-3-70B on four: 25 ms at one token, 346 at 2,048; all-reduces come to them.
        ("a100x4-llama3-70b", decodes(1, 64), 25.0, 34.0),
        ("a100x4-llama3-70b", prompt(2048), 345.0, 450.0),
        # 4.8 against 2.039 TB/s, 989.5 against 312 TFLOP/s.
        ("h200-llama3-8b", decodes(1, 64), 4.0, 6.5),
        ("h200-llama3-8b", prompt(2048), 40.0, 60.0),
        ("h200x4-llama3-70b", decodes(1, 64), 10.0, 18.0),
    ],
)
def test_it_is_near_published_figures(name: str, shape: StepShape, lowest_ms: float, highest_ms: float) -> None:
    assert lowest_ms < step_ms(name, shape) < highest_ms


def test_the_dimensions_make_the_model() -> None:
    """8.03 and 70.6 thousand million parameters, with embeddings at both ends, as their names say."""
    for name, parameters in (("a100-llama3-8b", 8.03e9), ("h200x4-llama3-70b", 70.55e9)):
        model = load_cost_model(name)
        assert isinstance(model, RooflineCost)
        both_ends = 2 * model.model.vocab_size * model.model.hidden_size
        assert model.model.layer_weights + both_ends == pytest.approx(parameters, rel=0.001)


@pytest.mark.parametrize("name", built_in_cost_models())
def test_more_of_anything_takes_longer(name: str) -> None:
    base = StepShape(prefill_tokens=64, num_decodes=8, context_tokens=4096, chunk_context=2048, num_chunks=1)
    for field in base.__struct_fields__:
        grown = msgspec.structs.replace(base, **{field: 100 * getattr(base, field)})
        assert step_ms(name, grown) > step_ms(name, base)


def test_decodes_share_the_reading_of_the_weights() -> None:
    alone, together = step_ms("h200-llama3-8b", decodes(1, 100)), step_ms("h200-llama3-8b", decodes(64, 100))
    assert alone < together < 2 * alone


def test_halving_the_bytes_of_a_weight_nearly_halves_a_decode() -> None:
    model = load_cost_model("h200-llama3-8b")
    assert isinstance(model, RooflineCost)
    dimensions = msgspec.structs.replace(model.model, bytes_per_weight=1)
    assert isinstance(dimensions, Dimensions)
    smaller = msgspec.structs.replace(model, model=dimensions)
    fixed_ns = model.efficiency.fixed_ns
    shape = decodes(1, 10)
    before, after = (cost.step_ns(shape, 0, 0) - fixed_ns for cost in (model, smaller))
    assert after == pytest.approx(before / 2, rel=0.02)
