"""`LLM` on a hybrid: prompts start from copies of states, and that changes no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from eventlm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.models.families.proof import SMALL, STABLE_BUILD, make_checkpoint
from tests.models.families.test_qwen_next import CASES
from tests.serving import verified

BLOCK_SIZE, NUM_TURNS, NUM_CHATS = 16, 6, 3
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, **SMALL | CASES["qwen 3.5"] | {"vocab_size": VOCAB_SIZE})
    make_tokenizer(folder)
    return folder


def chats(folder: Path, run: Path, *, prefix_cache: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Of each turn of several chats at once: the tokens, and how many of the prompt were cached."""
    rng = random.Random(0)
    options: dict[str, Any] = {"dtype": "bfloat16", "block_size": BLOCK_SIZE, "num_blocks": 64, "max_num_seqs": 4}
    # Prompts of some turns come in chunks.
    options |= {"max_num_batched_tokens": 32, "max_model_len": 256, "threads": 1, "state_interval": 32}
    options["cpu_kernels"] = STABLE_BUILD
    tokens, hits = [], []
    with LLM(folder, record=run, prefix_cache=prefix_cache, state_slots=24, **options) as llm:
        prompts: list[list[int]] = [[] for _ in range(NUM_CHATS)]
        for _ in range(NUM_TURNS):
            for prompt in prompts:
                prompt += [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 40))]
            outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], PARAMS, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                tokens.append(list(output.outputs[0].token_ids))
                hits.append([len(prompt), output.num_cached_tokens])
                prompt += tokens[-1]
    assert verified(run / "latest" / "trace.jsonl").result.clean_end
    return tokens, hits


def test_each_turn_starts_where_the_prompt_before_ended(folder: Path, tmp_path: Path) -> None:
    tokens, hits = chats(folder, tmp_path / "cached", prefix_cache=True)
    assert tokens == chats(folder, tmp_path / "not cached", prefix_cache=False)[0]
    for number, (_, num_cached) in enumerate(hits):
        before = hits[number - NUM_CHATS][0] if number >= NUM_CHATS else 0
        assert num_cached >= before // BLOCK_SIZE * BLOCK_SIZE, number
