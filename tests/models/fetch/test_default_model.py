"""The default model in bfloat16 against transformers on real prompts: in float32 under every kind of schedule, and in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eventlm.models.fetch.default_model import CONVERTED, DEFAULT_MODEL
from eventlm.models.fetch.pull import cached
from eventlm.worker.model_runner import ModelRunner
from tests.worker.launches import new_sequence
from tests.worker.reference import Key, Schedule, make_runner

pytestmark = pytest.mark.long

NUM_OUTPUT_TOKENS = 8
BLOCK_SIZE = 16
#: Blocks of each prompt's own.
NUM_OWN_BLOCKS = 8
#: Prompts of the schedules that cut prompts, or compute them again.
NUM_CUT = 8

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about autumn leaves.",
    "Explain photosynthesis to a ten-year-old child.",
    "The quick brown fox jumps over the lazy dog because",
    "def fibonacci(n):\n    ",
    "Translate 'good morning' into Spanish, French and German.",
    "List three uses of baking soda in the kitchen.",
    "Once upon a time, in a village by the sea, there lived",
    "What is 17 times 23?",
    "Why is the sky blue?",
    "Summarize the plot of Romeo and Juliet in one sentence.",
    "SELECT name, age FROM users WHERE",
    "The three primary colors are",
    "How do I boil an egg so that the yolk stays soft?",
    "Water freezes at 0 degrees Celsius, which in Fahrenheit is",
    "Give me a synonym for 'happy'.",
    "import numpy as np\n\nx = np.arange(10)\nprint(",
    "Who wrote Pride and Prejudice?",
    "Dear Sir or Madam, I am writing to complain about",
    "What is the difference between a virus and a bacterium?",
    "The first president of the United States was",
    "Name five animals that live in the ocean.",
    "In physics, the second law of thermodynamics states that",
    "Correct the grammar: 'She don't like apples.'",
    "What should I pack for a weekend hike in the mountains?",
    "The chemical symbol for gold is",
    "Tell me a short joke about computers.",
    "How far is the Moon from the Earth?",
    "To be, or not to be, that is the",
    "What are the ingredients of pancake batter?",
    "Explain what a prime number is.",
    "<html>\n<head>\n<title>",
    "The largest planet in our solar system is",
    "Suggest a name for a friendly robot.",
    "What happened in the year 1969?",
    "A train leaves the station at 3 pm and travels at 60 miles per hour. By 5 pm it has travelled",
    "How do airplanes fly?",
    "Write a polite e-mail asking for a day off.",
    "The opposite of 'cold' is",
    "What language is spoken in Brazil?",
    "for (int i = 0; i < 10; i++) {",
    "Describe the taste of a lemon.",
    "Machine learning is a field of study that",
    "Is a tomato a fruit or a vegetable?",
    "The recipe calls for two cups of flour, one cup of sugar and",
    "What is the meaning of the word 'ephemeral'?",
    "Yesterday I went to the market and bought",
    "How many continents are there, and what are they called?",
    "The mitochondria is the powerhouse of",
    "Give one reason why reading books is good for you.",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    folder = cached(DEFAULT_MODEL + CONVERTED)
    if folder is None:
        pytest.fail("the default model in bfloat16 is not cached: run `make checkpoints`", pytrace=False)
    return folder


@pytest.fixture(scope="module", params=[12, pytest.param(50, marks=pytest.mark.soak)])
def all_prompts(folder: Path, request: pytest.FixtureRequest) -> dict[Key, list[int]]:
    """Every other prompt goes through the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        if number % 2
        else prompt
        for number, prompt in enumerate(PROMPTS[: request.param])
    ]
    return {(number, 0): tokenizer(text, add_special_tokens=False)["input_ids"] for number, text in enumerate(texts)}


@pytest.fixture
def prompts(all_prompts: dict[Key, list[int]]) -> dict[Key, list[int]]:
    return dict(list(all_prompts.items())[:NUM_CUT])


def real_runner(folder: Path, dtype: str) -> ModelRunner:
    return make_runner(
        folder, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=1024, max_num_batched_tokens=4096, threads=1
    )


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return real_runner(folder, "float32")


@pytest.fixture
def schedule(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    schedule = Schedule(runner, monkeypatch)
    yield schedule
    schedule.forget_all()


Logits = dict[Key, torch.Tensor]


def rows_of(prompts: dict[Key, list[int]]) -> list[tuple[int, int, int, int, int]]:
    return [(*key, 0, len(prompt), 1) for key, prompt in prompts.items()]


def own_blocks(key: Key) -> list[int]:
    return list(range(key[0] * NUM_OWN_BLOCKS, (key[0] + 1) * NUM_OWN_BLOCKS))


def run_whole(schedule: Schedule, prompts: dict[Key, list[int]]) -> None:
    """All prompts in one step, then decodes, two launches deep."""
    schedule.step(
        new=[new_sequence(key[0], prompt) for key, prompt in prompts.items()],
        chunks=rows_of(prompts),
        blocks=[(row, 0, own_blocks(key)) for row, key in enumerate(prompts)],
    )
    schedule.step(decodes=[(*key, len(prompt), 1) for key, prompt in prompts.items()])
    schedule.decode(prompts, NUM_OUTPUT_TOKENS - 2, in_flight=1)


@pytest.fixture(scope="module")
def whole(runner: ModelRunner, all_prompts: dict[Key, list[int]]) -> Schedule:
    """What the runner says to the prompts; the first test shows that transformers says the same."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        schedule = Schedule(runner, monkeypatch)
        run_whole(schedule, all_prompts)
        schedule.forget_all()
    return schedule


class Exact(NamedTuple):
    """By transformers in float32, of a prompt and all of its output but the last token."""

    ids: list[int]
    #: The most likely token behind each of them.
    tokens: list[int]
    #: Those behind which the output's tokens stand, [tokens, V].
    logits: torch.Tensor


@pytest.fixture(scope="module")
def exact(folder: Path, all_prompts: dict[Key, list[int]], whole: Schedule) -> dict[Key, Exact]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    with torch.inference_mode():
        for key, prompt in all_prompts.items():
            ids = prompt + whole.outputs[key][:-1]
            logits = model(torch.tensor([ids])).logits[0]
            found[key] = Exact(ids, logits.argmax(dim=-1).tolist(), logits[-NUM_OUTPUT_TOKENS:].clone())
    return found


@pytest.fixture(scope="module")
def logits(exact: dict[Key, Exact]) -> Logits:
    return {key: each.logits for key, each in exact.items()}


def check(schedule: Schedule, logits: Logits, keys: dict[Key, list[int]]) -> None:
    """Tokens are transformers' greedy ones, logits are within 1e-4 of its."""
    assert list(schedule.outputs) == list(keys)
    for key in keys:
        assert schedule.outputs[key] == logits[key].argmax(dim=-1).tolist(), key
        assert (torch.stack(schedule.logits[key]) - logits[key]).abs().max().item() < 1e-4, key


def test_there_are_fifty_prompts() -> None:
    assert len(set(PROMPTS)) == 50


def test_whole_prefill_and_decode(whole: Schedule, all_prompts: dict[Key, list[int]], logits: Logits) -> None:
    check(whole, logits, all_prompts)


def test_chunks_of_odd_sizes(schedule: Schedule, prompts: dict[Key, list[int]], logits: Logits) -> None:
    """Every prompt in up to three chunks, a token more a prompt, in steps that others decode in already."""
    sizes = (5, 7, 1000)
    done = dict.fromkeys(prompts, 0)
    for number, size in enumerate(sizes):
        decodes = [(*key, len(prompts[key]) + len(out), 0) for key, out in schedule.outputs.items()]
        chunks = []
        for key, prompt in prompts.items():
            num_tokens = min(size + key[0] % 4, len(prompt) - done[key])
            if num_tokens:
                chunks.append((*key, done[key], num_tokens, int(done[key] + num_tokens == len(prompt))))
                done[key] += num_tokens
        schedule.step(
            new=[] if number else [new_sequence(key[0], prompt) for key, prompt in prompts.items()],
            decodes=decodes,
            chunks=chunks,
            blocks=[] if number else [(row, 0, own_blocks(key)) for row, key in enumerate(prompts)],
        )
    while late := [key for key in prompts if len(schedule.outputs[key]) < NUM_OUTPUT_TOKENS]:
        schedule.step(decodes=[(*key, len(prompts[key]) + len(schedule.outputs[key]), 0) for key in late])
    schedule.outputs = {key: schedule.outputs[key] for key in prompts}
    check(schedule, logits, prompts)


def test_prefix_cache_hits(schedule: Schedule, prompts: dict[Key, list[int]], logits: Logits) -> None:
    """A second sample of each long prompt reads the first's full blocks, half of them in the step that fills
    them.
    """
    long = {key: prompt for key, prompt in prompts.items() if len(prompt) > BLOCK_SIZE}
    assert len(long) >= 4
    num_hit_blocks = {key: (len(prompt) - 1) // BLOCK_SIZE for key, prompt in long.items()}
    same_step = [key for key in long if key[0] % 4 == 1]
    later = [key for key in long if key not in same_step]

    def hits(keys: list[Key]) -> list[tuple[int, int, int, int, int]]:
        starts = {key: num_hit_blocks[key] * BLOCK_SIZE for key in keys}
        return [(key[0], 1, starts[key], len(long[key]) - starts[key], 1) for key in keys]

    def blocks(keys: list[Key], first_row: int) -> list[tuple[int, int, list[int]]]:
        free = 50 * NUM_OWN_BLOCKS
        return [
            (
                first_row + row,
                0,
                own_blocks(key)[: num_hit_blocks[key]]
                + [number + free for number in own_blocks(key)[num_hit_blocks[key] :]],
            )
            for row, key in enumerate(keys)
        ]

    schedule.step(
        new=[new_sequence(key[0], prompt) for key, prompt in long.items()]
        + [new_sequence(key[0], long[key], index=1) for key in same_step],
        chunks=hits(same_step) + rows_of(long),
        blocks=blocks(same_step, 0) + [(len(same_step) + row, 0, own_blocks(key)) for row, key in enumerate(long)],
    )
    schedule.step(
        new=[new_sequence(key[0], long[key], index=1) for key in later],
        chunks=hits(later),
        blocks=blocks(later, 0),
    )
    second = {(key[0], 1): prompt for key, prompt in long.items()}
    schedule.decode(second, NUM_OUTPUT_TOKENS - 1)
    schedule.outputs = {key: schedule.outputs[key] for key in second}
    check(schedule, {(key[0], 1): found for key, found in logits.items()}, second)


def test_after_preemption(schedule: Schedule, prompts: dict[Key, list[int]], logits: Logits) -> None:
    """Every third sequence loses its blocks after three tokens and is recomputed in other ones."""
    schedule.step(
        new=[new_sequence(key[0], prompt) for key, prompt in prompts.items()],
        chunks=rows_of(prompts),
        blocks=[(row, 0, own_blocks(key)) for row, key in enumerate(prompts)],
    )
    schedule.decode(prompts, 2)
    victims = [key for key in prompts if key[0] % 3 == 0]
    others = {key: prompt for key, prompt in prompts.items() if key not in victims}
    histories = {key: prompts[key] + schedule.outputs[key] for key in victims}
    schedule.step(
        forget=victims,
        new=[new_sequence(key[0], ids, num_prompt_tokens=len(prompts[key])) for key, ids in histories.items()],
        decodes=[(*key, len(prompt) + 3, 0) for key, prompt in others.items()],
        chunks=rows_of(histories),
        blocks=[
            (len(others) + row, 0, [number + 50 * NUM_OWN_BLOCKS for number in reversed(own_blocks(key))])
            for row, key in enumerate(victims)
        ],
    )
    schedule.decode(prompts, NUM_OUTPUT_TOKENS - 4)
    check(schedule, logits, prompts)


def test_after_a_worker_s_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prompts: dict[Key, list[int]], logits: Logits
) -> None:
    """Another runner goes on from the histories."""
    schedule = Schedule(real_runner(folder, "float32"), monkeypatch)
    kept = {key: logits[key][:5].argmax(dim=-1).tolist() for key in prompts}
    histories = {key: prompt + kept[key] for key, prompt in prompts.items()}
    schedule.step(
        new=[new_sequence(key[0], ids, num_prompt_tokens=len(prompts[key])) for key, ids in histories.items()],
        chunks=rows_of(histories),
        blocks=[(row, 0, own_blocks(key)) for row, key in enumerate(prompts)],
    )
    schedule.decode(histories, NUM_OUTPUT_TOKENS - 6)
    check(schedule, {key: found[5:] for key, found in logits.items()}, prompts)


def test_bfloat16_agrees_with_float32_as_often_as_transformers_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, exact: dict[Key, Exact]
) -> None:
    """Share of positions, fed the same tokens, whose most likely token is that of transformers in float32.

    Every position is a row of one token over shared blocks, which the rows before it fill in the same step.
    """
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    schedule = Schedule(real_runner(folder, "bfloat16"), monkeypatch)
    own, theirs, num_positions = 0, 0, 0
    for key, (ids, tokens, _) in exact.items():
        with torch.inference_mode():
            said = reference(torch.tensor([ids])).logits[0].argmax(dim=-1).tolist()
        theirs += sum(map(int.__eq__, said, tokens))
        schedule.step(
            new=[new_sequence(key[0], ids[: end + 1], index=end) for end in range(len(ids))],
            chunks=[(key[0], end, end, 1, 1) for end in range(len(ids))],
            blocks=[(row, 0, own_blocks(key)) for row in range(len(ids))],
        )
        own += sum(schedule.outputs[key[0], end] == [token] for end, token in enumerate(tokens))
        num_positions += len(ids)
    print(f"{num_positions} positions: {own} agree here, {theirs} in transformers")
    assert own >= theirs - 0.005 * num_positions
