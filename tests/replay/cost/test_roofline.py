"""The roofline against published figures, within what its assumptions can promise."""

from __future__ import annotations

import msgspec
import pytest

from eventlm.core.predictor import StepShape
from eventlm.errors import UsageError
from eventlm.replay.cost.files import built_in_cost_models, load_cost_model
from eventlm.replay.cost.group_work import GroupWork
from eventlm.replay.cost.roofline import Dimensions, RooflineCost


def roofline(name: str) -> RooflineCost:
    model = load_cost_model(name)
    assert isinstance(model, RooflineCost)
    return model


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


def test_stages_share_the_layers_and_the_last_has_the_output_head() -> None:
    whole = roofline("a100-llama3-8b")
    stages_ns = whole.in_ranks(1, 3).stages_ns(GroupWork(prompt(2048)), 0, 0)
    fixed_ns = whole.efficiency.fixed_ns
    # 11, 11 and 10 of 32 layers.
    assert stages_ns[0] == stages_ns[1] == max(stages_ns[:2])
    assert sum(stages_ns) - 2 * fixed_ns == pytest.approx(whole.step_ns(prompt(2048), 0, 0), rel=1e-6)
    decode = decodes(1, 64)
    stages_ns = whole.in_ranks(1, 4).stages_ns(GroupWork(decode), 0, 0)
    assert stages_ns[3] > stages_ns[0]
    assert whole.in_ranks(1, 4).step_ns(decode, 0, 0) == stages_ns[3]
    # A token of 4,096 values of 2 bytes at 300 GB/s, beside 10 us.
    assert whole.hand_over_ns(prompt(3_000)) == pytest.approx(10_000 + 3_000 * 8192 / 300, rel=1e-4)


def test_tensor_ranks_share_each_layer_and_exchange_sums() -> None:
    whole = roofline("a100-llama3-8b")
    assert whole.in_ranks(1, 1) == whole
    shape, fixed_ns = prompt(2048), whole.efficiency.fixed_ns
    alone_ns = whole.step_ns(shape, 0, 0) - fixed_ns
    for tensor in (2, 4, 8):
        # 64 exchanges, of the sums of all others, in float32.
        exchanged_ns = 64 * (10_000 + (tensor - 1) * 2048 * 4096 * 4 // 300)
        split_ns = whole.in_ranks(tensor, 1).step_ns(shape, 0, 0) - fixed_ns
        assert split_ns - exchanged_ns == pytest.approx(alone_ns / tensor, rel=1e-3)


def test_groups_repeat_the_weights_and_exchange_outputs_of_shared_rows() -> None:
    whole = roofline("a100-llama3-8b")
    split = whole.in_ranks(1, 1, 2)
    shape = decodes(1, 100_000)
    assert split.stages_ns(GroupWork(shape), 0, 0) == whole.stages_ns(GroupWork(shape), 0, 0)
    # 32 layers: 10 us and the output of 32 heads, 130 values of 4 bytes each, for each of 8 rows.
    merged_ns = 32 * (10_000 + 8 * 32 * 130 * 4 // 300)
    (alone_ns,), (shared_ns,) = (split.stages_ns(GroupWork(shape, parts), 0, 0) for parts in (0, 8))
    assert shared_ns - alone_ns == pytest.approx(merged_ns, rel=1e-3)
    assert split.num_gpus == 2


def test_heads_of_keys_and_values_are_dealt_out_whole_and_repeated() -> None:
    def context_ps(tensor: int) -> int:
        return roofline("a100-llama3-8b").in_ranks(tensor, 1).rates[0].context_ps

    # 8 of them over 3 ranks: one has 3. Over 16 each has one.
    assert context_ps(3) == pytest.approx(context_ps(1) * 3 / 8, rel=1e-3)
    assert context_ps(16) == context_ps(8)


@pytest.mark.parametrize(
    ("name", "tensor", "stages", "words"),
    [
        ("h200x4-llama3-70b", 2, 1, "already splits each layer, over 4 x NVIDIA H200"),
        ("a100-llama3-8b", 33, 1, "--tensor-parallel-size 33: Meta-Llama-3-8B has 32 attention heads"),
        ("a100-llama3-8b", 1, 40, "--pipeline-parallel-size 40: Meta-Llama-3-8B has 32 layers"),
    ],
)
def test_what_cannot_be_split_is_refused(name: str, tensor: int, stages: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        roofline(name).in_ranks(tensor, stages)


def test_without_links_ranks_cannot_be_costed() -> None:
    model = roofline("a100-llama3-8b")
    unlinked = msgspec.structs.replace(model, machine=msgspec.structs.replace(model.machine, link_bytes_per_s=0))
    assert unlinked.in_ranks(1, 1) == unlinked
    with pytest.raises(UsageError, match="link_bytes_per_s"):
        unlinked.in_ranks(1, 2)
