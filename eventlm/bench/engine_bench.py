"""The engine by itself, without HTTP: requests of random tokens, submitted at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from eventlm.bench.draws import Lengths, random_stream
from eventlm.bootstrap.composition import Composition
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import FinishedOutput, Request, RequestHandle, TokensOutput
from eventlm.errors import EventLMError
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.tasks import completed


class BatchResult(NamedTuple):
    """A group of requests that went through the engine. Tokens are of all its requests, as far as they came.

    `num_finished` is below the number of requests only if it was interrupted.
    """

    num_finished: int
    prompt_tokens: int
    output_tokens: int
    duration_ns: int
    is_interrupted: bool


class RequestFactory:
    """Makes requests of random ordinary tokens that run to their full length."""

    def __init__(self, composed: Composition, *, seed: int, prefix_tokens: int = 0) -> None:
        """All prompts begin with the same `prefix_tokens`, on top of their length."""
        tokenizer = composed.tokenizer
        self._model = composed.engine.model_names[0]
        self._seed = seed
        self._num_made = 0
        self._token_ids = [token for token in range(composed.vocab_size) if tokenizer.token_bytes(token)]
        self._prompt_random = random_stream(seed, "prompt lengths")
        self._output_random = random_stream(seed, "output lengths")
        self._prefix = self._tokens(prefix_tokens, "prefix")

    def make(self, num_requests: int, prompt_lengths: Lengths, output_lengths: Lengths) -> list[Request]:
        """Make `num_requests` requests; a factory never repeats a prompt."""
        return [self._request(prompt_lengths, output_lengths) for _ in range(num_requests)]

    def _request(self, prompt_lengths: Lengths, output_lengths: Lengths) -> Request:
        index, self._num_made = self._num_made, self._num_made + 1
        tokens = self._tokens(prompt_lengths.draw(self._prompt_random), "prompt", index)
        return Request(
            prompt_token_ids=self._prefix + tokens,
            sampling=SamplingParams(
                temperature=1.0, max_tokens=output_lengths.draw(self._output_random), ignore_eos=True, seed=index
            ),
            scheduling=SchedulingParams(model=self._model, offline=True),
        )

    def _tokens(self, num_tokens: int, *name: str | int) -> list[int]:
        indices = random_stream(self._seed, *name).integers(len(self._token_ids), size=num_tokens)
        return [self._token_ids[index] for index in indices]


async def run_batch(
    engine: InferenceEngine,
    group: list[Request],
    stop: asyncio.Event,
    *,
    on_finish: Callable[[], object] | None = None,
) -> BatchResult:
    """Submit a group and wait for its end; `stop` ends it early. `on_finish` is called when a request has finished.

    Raises what the engine raises: ContextLengthError for a request that is too long, EngineUnavailableError if it
    dies.
    """
    counts = [0] * len(group)
    finished = [False] * len(group)

    async def consume(index: int, handle: RequestHandle) -> None:
        async for output in handle:
            if isinstance(output, TokensOutput):
                counts[index] += len(output.token_ids)
            elif isinstance(output, FinishedOutput):
                if output.reason != "length":
                    raise EventLMError(f"the engine ended a request of the benchmark by {output.reason!r}")
                finished[index] = True
                if on_finish is not None:
                    on_finish()

    start_ns = time.monotonic_ns()
    handles = await engine.submit(group)
    try:
        work = asyncio.gather(*(consume(index, handle) for index, handle in enumerate(handles)))
        is_interrupted = await completed(work, stop) is None
    finally:
        duration_ns = time.monotonic_ns() - start_ns
        for handle in handles:
            handle.cancel()
    prompt_tokens = sum(len(request.prompt_token_ids) for index, request in enumerate(group) if counts[index])
    return BatchResult(sum(finished), prompt_tokens, sum(counts), duration_ns, is_interrupted)
