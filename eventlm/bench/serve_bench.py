"""A load test of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from math import isinf
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, structs

from eventlm.bench.ceiling import measure_ceiling
from eventlm.bench.draws import ArrivalProcess, Lengths, arrival_times, random_stream
from eventlm.bench.input_files import Arrival, DatasetPrompt, read_arrivals, read_prompts
from eventlm.bench.load import MAX_UNANSWERED, Endpoint, Load
from eventlm.bench.prompts import (
    PromptMaker,
    SharedPrefixes,
    TokenizerPrompts,
    WordPrompts,
    find_tokenizer,
    fit_word_prompts,
    word_text,
)
from eventlm.bench.ranks import Ranks
from eventlm.bench.records import LoadRequest, LoadResult, Messages, RequestRecord
from eventlm.bench.retries import Retries
from eventlm.bench.workload import (
    SizedPrompt,
    dataset_prompts,
    load_requests,
    request_body,
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

if TYPE_CHECKING:
    from eventlm.bench.post_kernel import PostKernel

#: Requests where nothing else bounds the load.
DEFAULT_NUM_PROMPTS = 100
#: Of English text, without a tokenizer.
_CHARACTERS_A_TOKEN = 4
#: The least share of a rank in MAX_UNANSWERED: one request that fails says nothing about the server.
_MIN_UNANSWERED = 4
#: Words of the two prompts from which the server's tokens per word follow.
_PROBE_WORDS = (64, 192)
#: Streams at which the ceiling is measured where nothing bounds the load's own.
_CEILING_STREAMS = 64


class ServeOptions(Struct, frozen=True, kw_only=True):
    """Options of `eventlm bench serve`. `num_prompts` 0 and `duration_s` 0.0 set no limit.

    `max_concurrency` is that of all ranks together. `post_kernel` is in rounds, 0 for none.
    """

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
    retries: int = 0
    retry_backoff_ms: float = 200.0
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
    post_kernel: int = 0

    @property
    def is_open_loop(self) -> bool:
        """Whether requests are sent at given times, not when others end."""
        return bool(self.trace) or not isinf(self.request_rate) or not self.max_concurrency


class ServeResult(Struct):
    """The result of a load test. `post_kernel_place` says where the kernel behind each answer ran."""

    options: ServeOptions
    model: str
    endpoint: Endpoint
    ceiling_tokens_per_second: float | None
    load: LoadResult
    num_ranks: int = 1
    post_kernel_place: str = ""


class ServeBench:
    """One load test, or what one of several ranks does of it: `prepare`, then `run`.

    Raises UsageError for wrong options.
    """

    def __init__(self, options: ServeOptions, client: OpenAIClient, ranks: Ranks) -> None:
        self._options = options
        self._client = client
        self._ranks = ranks
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
        self._ceiling: float | None = None
        self._retries = Retries(
            options.retries,
            backoff_s=options.retry_backoff_ms / 1e3,
            max_wait_s=options.timeout_s,
            seed=options.seed,
        )
        self._post_kernel: PostKernel | None = None
        #: The number of requests, if it is known beforehand.
        self.num_requests: int | None = None

    async def prepare(self, on_phase: Callable[[str], None]) -> None:
        """Find the model, make the prompts, measure the ceiling, warm up.

        `on_phase` is called with a description of each phase that takes a while. Raises ClientError and UsageError.
        """
        options, ranks = self._options, self._ranks
        self._model = await ranks.first(self._find_model, str)
        if not all(await ranks.gathered(self._find_tokenizer(), bool)):
            # One prompt is the same on every rank.
            self._tokenizer = None
        on_phase("making prompts")
        prompts, warmup_prompts = await self._prompts()
        self._requests = self._bounded(load_requests(prompts, self._body, self._arrival_times()))
        if options.measures_ceiling:
            on_phase("measuring this client's own ceiling")
            self._ceiling = sum(await ranks.gathered(self._measure_ceiling(), float))
        if options.num_warmups:
            on_phase(f"warming up with {counted(options.num_warmups, 'request')}")
            warmups = load_requests(islice(warmup_prompts, options.num_warmups), self._body, None)
            await ranks.gathered(self._warm_up(islice(warmups, ranks.rank, None, ranks.size)), type(None))
        if options.post_kernel:
            on_phase("compiling the kernel behind the answers")
            await ranks.gathered(self._make_post_kernel(), type(None))

    async def run(self, stop: asyncio.Event, on_end: Callable[[RequestRecord], None]) -> ServeResult:
        """Put the load on the server. `stop` ends it early; `on_end` is called at the end of each request.

        On rank 0 the result has the requests of all ranks, on others none.
        """
        options, ranks = self._options, self._ranks
        limit = options.max_concurrency
        async with ranks.numbers(total=self.num_requests, max_concurrency=limit, stop=stop) as next_number:
            load = Load(
                self._client,
                self._endpoint,
                self._requests,
                max_concurrency=ranks.share(limit),
                duration_ns=round(options.duration_s * 1e9),
                max_unanswered=max(ranks.share(MAX_UNANSWERED), _MIN_UNANSWERED),
                retries=self._retries,
                rank=ranks.rank,
                next_number=next_number,
                post_kernel=self._post_kernel,
                on_end=on_end,
            )
            result = await load.run(stop)
        return ServeResult(
            options,
            self._model,
            self._endpoint,
            self._ceiling,
            ranks.merged(result),
            num_ranks=ranks.size,
            post_kernel_place=self._post_kernel.place if self._post_kernel is not None else "",
        )

    async def _find_model(self) -> str:
        """The model to ask for. A server without a list of models is assumed to serve --model."""
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

    async def _find_tokenizer(self) -> bool:
        self._tokenizer = find_tokenizer(self._options.tokenizer, self._model)
        return self._tokenizer is not None

    async def _measure_ceiling(self) -> float:
        """Of this rank; none where no place is left for it."""
        limit = self._options.max_concurrency
        num_streams = self._ranks.share(limit) if limit else _CEILING_STREAMS
        return await measure_ceiling(self._endpoint, num_streams=num_streams) if num_streams else 0.0

    async def _make_post_kernel(self) -> None:
        from eventlm.bench.post_kernel import PostKernel

        self._post_kernel = PostKernel(self._options.post_kernel, local_rank=self._ranks.local_rank)
        await self._post_kernel()

    async def _prompts(self) -> tuple[Iterator[SizedPrompt], Iterator[SizedPrompt]]:
        """The load's prompts, and others for the warm-up, so that the load's are not in the server's cache."""
        options = self._options
        if self._dataset:
            return self._dataset_prompts(self._dataset), self._dataset_prompts(self._dataset[::-1])
        make, prefixes = await self._prompt_maker(), None
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

    async def _prompt_maker(self) -> PromptMaker:
        is_completion = self._endpoint == "completions"
        if self._tokenizer is not None:
            return TokenizerPrompts(self._tokenizer, add_special_tokens=is_completion)
        # A chat's template comes on top of the length; what is put before every prompt does not.
        made = await self._ranks.first(self._word_prompts, WordPrompts)
        return made if is_completion else structs.replace(made, fixed=0.0)

    async def _word_prompts(self) -> WordPrompts:
        """Measure the tokens of two prompts on the server."""
        counts = []
        for num_words in _PROBE_WORDS:
            body = self._body(word_text(num_words, random_stream(self._options.seed, "probe", num_words)), 1)
            stream = self._client.stream_chat if self._endpoint == "chat" else self._client.stream_completion
            found = [delta.usage.prompt_tokens async for delta in stream(body) if delta.usage is not None]
            if not found or found[-1] is None:
                raise UsageError(f"{self._client.url} does not say how many tokens a prompt has; give --tokenizer")
            counts.append(found[-1])
        return fit_word_prompts(_PROBE_WORDS, (counts[0], counts[1]))

    def _body(self, content: str | Messages, max_tokens: int) -> dict[str, Any]:
        options = self._options
        common = {"model": self._model, "temperature": options.temperature, **options.extra_body}
        if options.ignore_eos:
            common = {"ignore_eos": True} | common
        return request_body(self._endpoint, content, max_tokens, common)

    def _arrival_times(self) -> Iterator[float] | None:
        options = self._options
        if self._trace:
            return (arrival.arrival_s for arrival in self._trace)
        if not options.is_open_loop:
            return None
        random = random_stream(options.seed, "arrivals")
        return arrival_times(options.arrivals, options.request_rate, burstiness=options.burstiness, random=random)

    def _bounded(self, requests: Iterator[LoadRequest]) -> Iterator[LoadRequest]:
        """The requests within the limits; made at once if their number is known, because making them takes time."""
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
        limit = self._options.max_concurrency and max(self._ranks.share(self._options.max_concurrency), 1)
        load = Load(self._client, self._endpoint, requests, max_concurrency=limit, retries=self._retries)
        for record in (await load.run(asyncio.Event())).records:
            if not record.is_success:
                raise ClientError(f"a warm-up request failed: {record.message}", "server")
