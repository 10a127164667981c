"""Random requests on a GPU's runner, with steps under way and too few blocks, get what a runner for CPUs gives them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eventlm.sampling_params import SamplingParams
from eventlm.text.grammar import choice_grammar, regex_grammar
from eventlm.worker.protocol import RowExtras
from tests.checkpoints import EOS_ID, VOCAB_SIZE
from tests.worker.gpu.driven import BUCKETS, Asked, Driven, gpu_runner, small_checkpoint
from tests.worker.reference import make_runner

#: A few more can be asked for by hand.
NUM_SEEDS = int(os.environ.get("EVENTLM_GPU_WORKLOADS", "4"))
BLOCK_SIZE = 4
MAX_PROMPT, MAX_TOKENS = 24, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def random_params(rng: random.Random) -> SamplingParams:
    """Of a request that is sampled."""

    def some(probability: float, value: Any, default: Any) -> Any:
        return value if rng.random() < probability else default

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCAB_SIZE), rng.randint(1, most)))

    grammar = rng.choice([choice_grammar(["yes", "no", "perhaps"], "p"), regex_grammar("[a-f]{1,9}", "p")])
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=some(0.2, rng.randint(1, 30), 0),
        top_p=some(0.2, 0.8, 1.0),
        min_p=some(0.1, 0.05, 0.0),
        repetition_penalty=some(0.15, 1.3, 1.0),
        frequency_penalty=some(0.15, 0.7, 0.0),
        presence_penalty=some(0.1, 1.1, 0.0),
        logit_bias=some(0.15, {token: rng.uniform(-5, 5) for token in ids(3)}, None),
        allowed_token_ids=some(0.1, sorted({*ids(20), EOS_ID}), None),
        bad_words_token_ids=some(0.15, (ids(3), ids(1), ids(2)), ()),
        seed=rng.randrange(2**64),
        min_tokens=some(0.2, rng.randint(1, 4), 0),
        eos_token_ids=(EOS_ID,),
        ignore_eos=rng.random() < 0.3,
        # Many, so that some end unforeseen.
        stop_token_ids=some(0.4, ids(60), ()),
        grammar=some(0.2, grammar, ""),
        logprobs=some(0.15, rng.randint(0, 3), None),
        prompt_logprobs=some(0.1, 1, None),
    )


def random_asked(rng: random.Random) -> list[Asked]:
    """Requests, many of which begin alike."""
    common = [rng.randrange(5, VOCAB_SIZE) for _ in range(MAX_PROMPT)]
    asked = []
    for _ in range(rng.randint(3, 7)):
        length = rng.randint(1, MAX_PROMPT)
        same = rng.choice([0, length, length // 2])
        prompt = common[:same] + [rng.randrange(5, VOCAB_SIZE) for _ in range(length - same)]
        kind = rng.choices(["generate", "score", "pool"], [9, 1, 1])[0]
        params = random_params(rng)
        if kind != "generate":
            params = SamplingParams(pooling=rng.choice(["mean", "last"]))
        asked.append(
            Asked(
                prompt,
                rng.randint(1, MAX_TOKENS) if kind == "generate" else 0,
                params,
                n=rng.choice([1, 1, 2]) if kind == "generate" else 1,
                kind=kind,  # type: ignore[arg-type]
                after=rng.choice([0, 0, rng.randint(1, 20)]),
                leaves=rng.choice([0, 0, 0, rng.randint(2, 30)]),
                shares=kind == "generate" and params.prompt_logprobs is None,
                priority=rng.choice([0, 0, -1]),
            )
        )
    return asked


def same_extras(found: list[RowExtras], expected: list[RowExtras]) -> None:
    """But for rounding, and for what was computed again after a preemption."""
    logprobs, others = [[each.logprobs for each in some if each.logprobs is not None] for some in (found, expected)]
    for one, other in zip(logprobs, others, strict=False):
        assert one.ranks == other.ranks
        assert one.top_ids == other.top_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
    prompts, others = [
        {
            each.prompt_start + index: number
            for each in some
            if each.prompt_logprobs is not None
            for index, number in enumerate(each.prompt_logprobs.logprobs)
        }
        for some in (found, expected)
    ]
    for position in prompts.keys() & others.keys():
        assert prompts[position] == pytest.approx(others[position], abs=1e-3)
    embeddings, others = [
        [np.frombuffer(e.embedding, "<f4") for e in some if e.embedding] for some in (found, expected)
    ]
    for one, other in zip(embeddings, others, strict=False):
        np.testing.assert_allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_steps_under_way_change_nothing(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    asked = random_asked(rng)
    num_blocks = rng.choice([10, 12, 16])
    limits = {
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "max_model_len": (num_blocks - 1) * BLOCK_SIZE,
        "max_num_batched_tokens": rng.choice([8, 12, 32]),
        "max_num_seqs": rng.choice([2, 4, 8]),
    }
    depth = rng.choice([2, 3])
    runner = gpu_runner(
        folder, **limits, max_steps_in_flight=depth, graph_buckets=rng.choice([[], BUCKETS[:2], BUCKETS])
    )
    driven = Driven(runner, asked, depth=depth)
    alone = [each._replace(after=0, leaves=0, shares=False) for each in asked]
    expected = Driven(make_runner(folder, block_size=BLOCK_SIZE, threads=0), alone, depth=1)
    for sample, (reason, position) in driven.reasons.items():
        assert driven.samples[sample][:position] == expected.samples[sample][:position], (sample, asked[sample.number])
        if reason != "cancelled":
            assert (reason, position) == expected.reasons[sample]
            same_extras(driven.extras.get(sample, []), expected.extras.get(sample, []))
    assert driven.reasons.keys() == expected.reasons.keys()
