"""A load test of a server from its options to its statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from math import isinf
from typing import Any, Literal

from msgspec import Struct

from eventlm.bench.arrivals import ArrivalProcess, arrival_times
from eventlm.bench.ceiling import Ceiling, measure_ceiling
from eventlm.bench.dataset import DatasetPrompt, read_prompts
from eventlm.bench.lengths import Lengths
from eventlm.bench.load import Endpoint, Load
from eventlm.bench.prompts import (
    PromptMaker,
    SharedPrefixes,
    TokenizerPrompts,
    WordCost,
    WordPrompts,
    fit_word_cost,
    word_text,
)
from eventlm.bench.random_streams import random_stream
from eventlm.bench.records import LoadRequest, LoadResult, RequestRecord
from eventlm.bench.tokenizers import find_tokenizer
from eventlm.bench.trace_arrivals import Arrival, read_arrivals
from eventlm.bench.workload import (
    BodyShape,
    SizedPrompt,
    dataset_prompts,
    load_requests,
    synthetic_prompts,
    trace_prompts,
)
from eventlm.client.errors import ClientError
from eventlm.client.openai_client import OpenAIClient
from eventlm.config.objectives import Objectives
from eventlm.config.options import did_you_mean
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.text.tokenizer import Tokenizer

#: Requests where nothing else bounds the load.
DEFAULT_NUM_PROMPTS = 100
#: Of English text, where nobody can count.
_CHARACTERS_A_TOKEN = 4
#: Words of the two prompts from which the server's tokens per word follow.
_PROBE_WORDS = (64, 192)
#: Streams at which the ceiling is measured where nothing bounds the load's own.
_CEILING_STREAMS = 64


class ServeOptions(Struct, frozen=True, kw_only=True):
    """What `eventlm bench serve` is asked to do. `num_prompts` 0 and `duration_s` 0.0 set no limit."""

    url: str
    model: str = ""
    api_key: str = ""
    endpoint: Endpoint | Literal["auto"] = "auto"
    timeout_s: float = 600.0
    arrivals: ArrivalProcess = "poisson"
    request_rate: float = float("inf")
    burstiness: float = 1.0
    trace: str = ""
    max_concurrency: int = 0
    num_prompts: int = 0
    duration_s: float = 0.0
    dataset: str = ""
    shuffle: bool = False
    input_lengths: Lengths
    output_lengths: Lengths
    prefix_tokens: int = 0
    num_prefixes: int = 1
    tokenizer: str = ""
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: dict[str, Any] = {}
    seed: int = 0
    num_warmups: int = 0
    measures_ceiling: bool = True
    objectives: Objectives | None = None

    @property
    def is_open_loop(self) -> bool:
        """Whether requests come at times of their own, not as places come free."""
        return bool(self.trace) or not isinf(self.request_rate) or not self.max_concurrency


class ServeResult(Struct):
    """A load test: what was asked, of whom, the client's ceiling, and what came back."""

    options: ServeOptions
    model: str
    endpoint: Endpoint
    ceiling: Ceiling | None
    load: LoadResult


class ServeBench:
    """One load test: `prepare`, then `run`. What is wrong with the options is a UsageError of the constructor."""

    def __init__(self, options: ServeOptions, client: OpenAIClient) -> None:
        self._options = options
        self._client = client
        self._trace: list[Arrival] = read_arrivals(options.trace) if options.trace else []
        self._dataset: list[DatasetPrompt] = read_prompts(options.dataset) if options.dataset else []
        self._endpoint: Endpoint = "completions"
        if options.endpoint != "auto":
            self._endpoint = options.endpoint
        elif any(not isinstance(prompt.content, str) for prompt in self._dataset):
            self._endpoint = "chat"
        self._num_prompts = options.num_prompts
        if not (options.num_prompts or options.duration_s or options.trace):
            self._num_prompts = len(self._dataset) or DEFAULT_NUM_PROMPTS
        if not self._num_prompts and not options.trace and options.is_open_loop and isinf(options.request_rate):
            raise UsageError("--duration needs a --request-rate, a --max-concurrency or a --num-prompts beside it")
        self._model = ""
        self._tokenizer: Tokenizer | None = None
        self._requests: Iterator[LoadRequest] = iter(())
        self._ceiling: Ceiling | None = None
        #: How many requests there will be, where that is known beforehand.
        self.num_requests: int | None = None

    async def prepare(self, on_phase: Callable[[str], None]) -> None:
        """Find the model, make the prompts, measure the ceiling, warm up.

        `on_phase` gets what takes a while, in words. Raises ClientError and UsageError for what is in the way.
        """
        options = self._options
        self._model = await self._find_model()
        self._tokenizer = find_tokenizer(options.tokenizer, self._model)
        on_phase("making prompts")
        shape = BodyShape(
            model=self._model,
            endpoint=self._endpoint,
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
            extra=options.extra_body,
        )
        prompts, warmup_prompts = await self._prompts(shape)
        self._requests = self._bounded(load_requests(prompts, shape, self._arrival_times()))
        if options.measures_ceiling:
            on_phase("measuring this client's own ceiling")
            num_streams = options.max_concurrency or _CEILING_STREAMS
            self._ceiling = await measure_ceiling(self._endpoint, num_streams=num_streams)
        if options.num_warmups:
            on_phase(f"warming up with {counted(options.num_warmups, 'request')}")
            await self._warm_up(load_requests(islice(warmup_prompts, options.num_warmups), shape, None))

    async def run(self, stop: asyncio.Event, on_end: Callable[[RequestRecord], None]) -> ServeResult:
        """Put the load on the server. `stop` ends it early; `on_end` is called at the end of each request."""
        load = Load(
            self._client,
            self._endpoint,
            self._requests,
            max_concurrency=self._options.max_concurrency,
            duration_ns=round(self._options.duration_s * 1e9),
            on_end=on_end,
        )
        return ServeResult(self._options, self._model, self._endpoint, self._ceiling, await load.run(stop))

    async def _find_model(self) -> str:
        """The model to ask for. A server without a list of models is taken at --model's word."""
        url, wanted = self._client.url, self._options.model
        try:
            models = await self._client.models()
        except ClientError as error:
            if wanted and error.status == 404:
                return wanted
            raise
        if wanted in models:
            return wanted
        if not models:
            raise UsageError(f"{url} serves no model")
        if not wanted:
            return models[0]
        raise UsageError(f"--model {wanted} is not served at {url}{did_you_mean(wanted, models, listed_as='served')}")

    async def _prompts(self, shape: BodyShape) -> tuple[Iterator[SizedPrompt], Iterator[SizedPrompt]]:
        """The load's prompts, and others to warm up with, which the server shall not find in its cache later."""
        options = self._options
        if self._dataset:
            return self._dataset_prompts(self._dataset), self._dataset_prompts(self._dataset[::-1])
        make, prefixes = await self._prompt_maker(shape), None
        if options.prefix_tokens:
            prefixes = SharedPrefixes(
                make, num_tokens=options.prefix_tokens, num_prefixes=options.num_prefixes, seed=options.seed
            )
        lengths = options.input_lengths, options.output_lengths
        warmup_prompts = synthetic_prompts(make, *lengths, seed=options.seed + 2**32, prefixes=None)
        if self._trace:
            return trace_prompts(make, self._trace, seed=options.seed, prefixes=prefixes), warmup_prompts
        return synthetic_prompts(make, *lengths, seed=options.seed, prefixes=prefixes), warmup_prompts

    def _dataset_prompts(self, prompts: list[DatasetPrompt]) -> Iterator[SizedPrompt]:
        options = self._options
        return dataset_prompts(
            prompts,
            options.output_lengths,
            seed=options.seed,
            shuffle=options.shuffle,
            count_tokens=self._count_tokens,
        )

    def _count_tokens(self, text: str) -> int:
        if self._tokenizer is None:
            return len(text) // _CHARACTERS_A_TOKEN
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    async def _prompt_maker(self, shape: BodyShape) -> PromptMaker:
        is_completion = self._endpoint == "completions"
        if self._tokenizer is not None:
            return TokenizerPrompts(self._tokenizer, add_special_tokens=is_completion)
        # A chat's template comes on top of the length, what is put before every prompt does not.
        return WordPrompts(await self._word_cost(shape), counts_fixed=is_completion)

    async def _word_cost(self, shape: BodyShape) -> WordCost:
        """Ask the server what words cost."""
        counts = []
        for num_words in _PROBE_WORDS:
            body = shape.body(word_text(num_words, random_stream(self._options.seed, "probe", num_words)), 1)
            stream = self._client.stream_chat if self._endpoint == "chat" else self._client.stream_completion
            found = [delta.usage.prompt_tokens async for delta in stream(body) if delta.usage is not None]
            if not found or found[-1] is None:
                raise UsageError(f"{self._client.url} does not say how many tokens a prompt has; give --tokenizer")
            counts.append(found[-1])
        return fit_word_cost(_PROBE_WORDS, (counts[0], counts[1]))

    def _arrival_times(self) -> Iterator[float] | None:
        options = self._options
        if self._trace:
            return (arrival.arrival_s for arrival in self._trace)
        if not options.is_open_loop:
            return None
        random = random_stream(options.seed, "arrivals")
        return arrival_times(options.arrivals, options.request_rate, burstiness=options.burstiness, random=random)

    def _bounded(self, requests: Iterator[LoadRequest]) -> Iterator[LoadRequest]:
        """The requests under the limits; made now where their number is known, for that takes time of its own."""
        options = self._options
        if self._num_prompts:
            requests = islice(requests, self._num_prompts)
        if options.duration_s and options.is_open_loop:
            last_ns = options.duration_s * 1e9
            requests = takewhile(lambda request: (request.arrival_ns or 0) <= last_ns, requests)
        elif not self._num_prompts and not self._trace:
            return requests
        made = list(requests)
        self.num_requests = len(made)
        return iter(made)

    async def _warm_up(self, requests: Iterator[LoadRequest]) -> None:
        load = Load(self._client, self._endpoint, requests, max_concurrency=self._options.max_concurrency)
        for record in (await load.run(asyncio.Event())).records:
            if not record.is_success:
                raise ClientError(f"a warm-up request failed: {record.message}", "server")
