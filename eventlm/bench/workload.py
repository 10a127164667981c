"""From prompts, lengths and arrivals to the requests of a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat
from typing import Any

from msgspec import Struct

from eventlm.bench.dataset import DatasetPrompt
from eventlm.bench.lengths import Lengths
from eventlm.bench.load import Endpoint
from eventlm.bench.prompts import PromptMaker, SharedPrefixes
from eventlm.bench.random_streams import random_stream
from eventlm.bench.records import LoadRequest, Messages
from eventlm.bench.trace_arrivals import Arrival
from eventlm.errors import UsageError


class SizedPrompt(Struct, frozen=True):
    """A prompt with the lengths that are aimed at; `num_tokens` None where nobody has counted."""

    content: str | Messages
    max_tokens: int
    num_tokens: int | None = None


class BodyShape(Struct, frozen=True, kw_only=True):
    """What all bodies of a load have in common. `extra` goes over everything else."""

    model: str
    endpoint: Endpoint
    ignore_eos: bool = False
    temperature: float = 0.0
    extra: dict[str, Any] = {}

    def body(self, content: str | Messages, max_tokens: int) -> dict[str, Any]:
        """The body of one request. Raises UsageError for a conversation at the completions endpoint."""
        if self.endpoint == "completions" and not isinstance(content, str):
            raise UsageError("the data set has `messages`, which only --endpoint chat takes")
        prompt: dict[str, Any] = {"prompt": content}
        if self.endpoint == "chat":
            prompt = {"messages": [{"role": "user", "content": content}] if isinstance(content, str) else content}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            **({"ignore_eos": True} if self.ignore_eos else {}),
            "stream_options": {"include_usage": True},
            **self.extra,
        }


def synthetic_prompts(
    make: PromptMaker, prompt_lengths: Lengths, output_lengths: Lengths, *, seed: int, prefixes: SharedPrefixes | None
) -> Iterator[SizedPrompt]:
    """Prompts of words, without an end. A prefix comes on top of the prompt's length."""
    prompt_random, output_random = random_stream(seed, "prompt lengths"), random_stream(seed, "output lengths")
    sizes = ((prompt_lengths.draw(prompt_random), output_lengths.draw(output_random)) for _ in repeat(None))
    return _made_prompts(make, sizes, seed=seed, prefixes=prefixes)


def trace_prompts(
    make: PromptMaker, arrivals: Iterable[Arrival], *, seed: int, prefixes: SharedPrefixes | None
) -> Iterator[SizedPrompt]:
    """Prompts of words with the lengths of a trace."""
    sizes = ((arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals)
    return _made_prompts(make, sizes, seed=seed, prefixes=prefixes)


def _made_prompts(
    make: PromptMaker, sizes: Iterable[tuple[int, int]], *, seed: int, prefixes: SharedPrefixes | None
) -> Iterator[SizedPrompt]:
    for index, (num_tokens, max_tokens) in enumerate(sizes):
        text = make(num_tokens, random_stream(seed, "prompt", index))
        if prefixes is not None:
            text, num_tokens = prefixes.before(text), num_tokens + prefixes.num_tokens
        yield SizedPrompt(text, max_tokens, num_tokens)


def dataset_prompts(
    prompts: list[DatasetPrompt],
    output_lengths: Lengths,
    *,
    seed: int,
    shuffle: bool,
    count_tokens: Callable[[str], int],
) -> Iterator[SizedPrompt]:
    """The prompts of a file, over and over; `shuffle` draws a new order for each round."""
    output_random, order_random = random_stream(seed, "output lengths"), random_stream(seed, "order")
    while True:
        order = order_random.permutation(len(prompts)) if shuffle else range(len(prompts))
        for place in order:
            prompt = prompts[int(place)]
            max_tokens = prompt.max_tokens
            if max_tokens is None and prompt.answer:
                max_tokens = max(count_tokens(prompt.answer), 1)
            yield SizedPrompt(prompt.content, max_tokens or output_lengths.draw(output_random))


def load_requests(
    prompts: Iterable[SizedPrompt], shape: BodyShape, arrival_times_s: Iterator[float] | None
) -> Iterator[LoadRequest]:
    """Requests in the order of their arrivals; without arrivals, for a closed loop."""
    arrivals = repeat(None) if arrival_times_s is None else (round(time_s * 1e9) for time_s in arrival_times_s)
    for index, prompt, arrival_ns in zip(count(), prompts, arrivals):
        body = shape.body(prompt.content, prompt.max_tokens)
        yield LoadRequest(index, body, arrival_ns, prompt.num_tokens)
