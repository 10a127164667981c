"""From prompts, lengths and arrivals to the requests of a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat
from typing import Any

from msgspec import Struct

from eventlm.bench.draws import Lengths, random_stream
from eventlm.bench.input_files import Arrival, DatasetPrompt
from eventlm.bench.load import Endpoint
from eventlm.bench.prompts import PromptMaker, SharedPrefixes
from eventlm.bench.records import LoadRequest, Messages
from eventlm.errors import UsageError


class SizedPrompt(Struct, frozen=True):
    """A prompt with the intended lengths; `num_tokens` None if they were not counted."""

    content: str | Messages
    max_tokens: int
    num_tokens: int | None = None


def request_body(
    endpoint: Endpoint, content: str | Messages, max_tokens: int, common: dict[str, Any]
) -> dict[str, Any]:
    """The body of one request; the `common` fields of all go over the others.

    Raises UsageError for a conversation at the completions endpoint.
    """
    if endpoint == "completions" and not isinstance(content, str):
        raise UsageError("the data set has `messages`, which only --endpoint chat takes")
    prompt: dict[str, Any] = {"prompt": content}
    if endpoint == "chat":
        prompt = {"messages": [{"role": "user", "content": content}] if isinstance(content, str) else content}
    return {**prompt, "max_tokens": max_tokens, "stream_options": {"include_usage": True}, **common}


def synthetic_prompts(
    make: PromptMaker, prompt_lengths: Lengths, output_lengths: Lengths, *, seed: int, prefixes: SharedPrefixes | None
) -> Iterator[SizedPrompt]:
    """Endless prompts of words. A prefix comes on top of the prompt's length."""
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
        for index in order:
            prompt = prompts[int(index)]
            max_tokens = prompt.max_tokens
            if max_tokens is None and prompt.answer:
                max_tokens = max(count_tokens(prompt.answer), 1)
            yield SizedPrompt(prompt.content, max_tokens or output_lengths.draw(output_random))


def load_requests(
    prompts: Iterable[SizedPrompt],
    body: Callable[[str | Messages, int], dict[str, Any]],
    arrival_times_s: Iterator[float] | None,
) -> Iterator[LoadRequest]:
    """Requests in the order of their arrivals; without arrivals, for a closed loop."""
    arrivals = repeat(None) if arrival_times_s is None else (round(time_s * 1e9) for time_s in arrival_times_s)
    for index, prompt, arrival_ns in zip(count(), prompts, arrivals):
        yield LoadRequest(index, body(prompt.content, prompt.max_tokens), arrival_ns, prompt.num_tokens)
