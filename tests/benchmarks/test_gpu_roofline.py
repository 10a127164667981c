"""The roofline of a recorded run: what its steps must move and multiply, and what lies between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_harness.roofline import Step, floor_seconds, gaps, read_steps
from eventlm import LLM, SamplingParams
from eventlm.bench.step.machine_probe import Machine
from eventlm.events import Launched
from eventlm.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec

ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=2, rope=RopeSpec(rotary_dim=2), scale=2**-0.5)
CONFIG = ModelSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=100,
    hidden_size=8,
    layers=(LayerSpec(attention=ATTENTION, feed_forward=FeedForwardSpec(size=16)),) * 3,
    norm=NormSpec(eps=1e-6),
    max_position_embeddings=100,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
#: 3 layers of q, k and v, o, gate and up, down; the last product.
NUM_WEIGHTS = 3 * (8 * 16 + 8 * 8 + 2 * 8 * 16 + 16 * 8) + 8 * 100


def step(start_ns: int, end_ns: int, *, decodes: int = 2, context: int = 10, chunks: int = 0) -> Step:
    """A step of decodes behind so many tokens and of chunks of 5."""
    launch = Launched(
        replica=0,
        epoch=0,
        step=0,
        decodes=[(1, 0, context, 0)] * decodes,
        chunks=[(1, 0, 0, 5, 1)] * chunks,
        num_tokens=decodes + 5 * chunks,
        predicted_ns=0,
    )
    return Step(launch, start_ns, end_ns)


def test_a_step_that_moves_bytes_takes_as_long_as_they_do() -> None:
    machine = Machine(bytes_per_second=1e3, flops_per_second=1e15)
    kv_token_bytes = 2 * 3 * 2 * 2 * 2
    # Each of 2 sequences is read with its 10 tokens, and a token of each is written.
    num_bytes = 2 * NUM_WEIGHTS + (20 + 2) * kv_token_bytes
    assert floor_seconds(CONFIG, [step(0, 1)], machine) == pytest.approx(num_bytes / 1e3)
    assert floor_seconds(CONFIG, [step(0, 1)] * 3, machine) == pytest.approx(3 * num_bytes / 1e3)
    less = floor_seconds(CONFIG, [step(0, 1)], machine, kv_element_bytes=1)
    assert less == pytest.approx((num_bytes - 11 * kv_token_bytes) / 1e3)


def test_a_step_that_multiplies_takes_as_long_as_that() -> None:
    machine = Machine(bytes_per_second=1e15, flops_per_second=1e3)
    # A score and a weighted value for each pair, 4 heads of 2.
    attention = 4 * 3 * 8 * 20
    assert floor_seconds(CONFIG, [step(0, 1)], machine) == pytest.approx((2 * 2 * NUM_WEIGHTS + attention) / 1e3)


def test_gaps_are_between_decodes_that_follow_one_another() -> None:
    steps = [step(0, 90), step(100, 190), step(200, 300, chunks=1), step(320, 400), step(410, 500, decodes=1)]
    found = gaps(steps, num_rows=2)
    assert found.num_steps == 2
    assert found.idle == pytest.approx(0.1)
    assert (found.period, found.duration) == pytest.approx((100e-9, 90e-9))
    with pytest.raises(ValueError, match="no two steps that follow one another decode 3 sequences"):
        gaps(steps, num_rows=3)


def test_steps_are_those_of_the_requests_that_are_meant(tmp_path: Path) -> None:
    with LLM("fake", record=tmp_path, num_blocks=100, max_model_len=512) as llm:
        for num_prompts, num_tokens in ((3, 2), (2, 5), (4, 7)):
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            llm.generate([[number, num_prompts] for number in range(num_prompts)], params, use_tqdm=False)
        folder = llm.run_folder
    assert folder is not None
    steps = read_steps(folder, num_before=3, num_requests=2)
    assert sum(len(each.launch.decodes) + len(each.launch.chunks) for each in steps) == 2 * 5
    assert all(each.end_ns > each.start_ns for each in steps)
    assert sum(each.only_decodes for each in steps) > 0
