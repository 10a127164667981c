"""From prompts to the bodies that are sent."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from eventlm.bench.draws import parse_lengths
from eventlm.bench.input_files import Arrival, DatasetPrompt
from eventlm.bench.prompts import SharedPrefixes, WordPrompts
from eventlm.bench.records import Messages
from eventlm.bench.workload import (
    SizedPrompt,
    dataset_prompts,
    load_requests,
    request_body,
    synthetic_prompts,
    trace_prompts,
)
from eventlm.errors import UsageError

MAKE = WordPrompts(0.0, 1.0)
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def synthetic(seed: int, count: int = 8, input_len: str = "uniform:min=2,max=9") -> list[SizedPrompt]:
    lengths = parse_lengths(input_len, "--input-len"), parse_lengths("uniform:min=1,max=50", "--output-len")
    return list(islice(synthetic_prompts(MAKE, *lengths, seed=seed, prefixes=None), count))


def test_synthetic_prompts_follow_from_the_seed() -> None:
    assert synthetic(1) == synthetic(1)
    assert synthetic(1) != synthetic(2)
    assert synthetic(1, 4) == synthetic(1, 8)[:4]
    assert all(len(str(prompt.content).split()) == prompt.num_tokens for prompt in synthetic(1))


def test_output_lengths_do_not_depend_on_the_prompts() -> None:
    other = synthetic(1, input_len="normal:mean=40,std=9")
    assert [prompt.max_tokens for prompt in synthetic(1)] == [prompt.max_tokens for prompt in other]


def test_a_prefix_comes_on_top() -> None:
    prefixes = SharedPrefixes(MAKE, num_tokens=20, num_prefixes=1, seed=0)
    arrivals = [Arrival(0.0, 5, 3), Arrival(1.0, 6, 4)]
    prompts = list(trace_prompts(MAKE, arrivals, seed=0, prefixes=prefixes))
    assert [(prompt.num_tokens, prompt.max_tokens) for prompt in prompts] == [(25, 3), (26, 4)]
    assert [len(str(prompt.content).split()) for prompt in prompts] == [25, 26]


def from_dataset(*, shuffle: bool, seed: int = 0, count: int = 6) -> list[SizedPrompt]:
    prompts = [DatasetPrompt("a", 5), DatasetPrompt("b", None, "one two three"), DatasetPrompt("c")]
    lengths = parse_lengths("9", "--output-len")
    return list(
        islice(
            dataset_prompts(prompts, lengths, seed=seed, shuffle=shuffle, count_tokens=lambda text: len(text.split())),
            count,
        )
    )


def test_a_data_set_is_taken_over_and_over() -> None:
    expected = [SizedPrompt("a", 5), SizedPrompt("b", 3), SizedPrompt("c", 9)]
    assert from_dataset(shuffle=False) == expected * 2


def test_a_shuffled_data_set_is_whole_in_each_round() -> None:
    prompts = from_dataset(shuffle=True, count=30)
    assert prompts == from_dataset(shuffle=True, count=30)
    rounds = [[prompt.content for prompt in prompts[index : index + 3]] for index in range(0, 30, 3)]
    assert all(Counter(each) == Counter("abc") for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1


def test_bodies() -> None:
    usage = {"stream_options": {"include_usage": True}}
    common = {"model": "m", "temperature": 1, "top_k": 3}
    assert request_body("completions", "hi", 5, common) == {"prompt": "hi", "max_tokens": 5, **common, **usage}
    assert request_body("chat", "hi", 5, common | {"max_tokens": 6}) == {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, **common, **usage,
    }  # fmt: skip
    assert request_body("chat", MESSAGES, 5, common)["messages"] == MESSAGES
    with pytest.raises(UsageError, match="only --endpoint chat"):
        request_body("completions", MESSAGES, 5, common)


def test_requests_have_their_arrivals() -> None:
    def body(content: str | Messages, max_tokens: int) -> dict[str, Any]:
        return {"prompt": content, "max_tokens": max_tokens}

    prompts = [SizedPrompt("a", 1, 4), SizedPrompt("b", 2)]
    requests = list(load_requests(prompts, body, iter([0.25, 0.5, 0.75])))
    assert [(request.index, request.arrival_ns, request.prompt_tokens) for request in requests] == [
        (0, 250_000_000, 4),
        (1, 500_000_000, None),
    ]
    assert [request.arrival_ns for request in load_requests(prompts, body, None)] == [None, None]
