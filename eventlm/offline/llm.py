"""`LLM`: runs lists of prompts through a model, from a script, a notebook or any other program."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import multiprocessing.util
import queue
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
from msgspec import structs

from eventlm.config import ModelConfig
from eventlm.engine.request import Request
from eventlm.errors import InputError, UsageError
from eventlm.offline.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from eventlm.offline.collector import AnyRequestOutput, Collector, collect
from eventlm.offline.engine_thread import EngineThread, next_item
from eventlm.offline.options import StrPath, compose_from, in_keywords, keywords_in_errors
from eventlm.offline.outputs import EmbeddingRequestOutput, RequestOutput
from eventlm.offline.progress import Progress, UseTqdm
from eventlm.offline.prompts import Message, Prompt, PromptType, parse_prompts, render_conversations
from eventlm.sampling_params import SamplingParams
from eventlm.text.generation import submit
from eventlm.text.grammar import structured_outputs_grammar
from eventlm.text.prompt_encoder import bad_words_token_ids
from eventlm.text.request_builder import RequestBuilder
from eventlm.tracebacks import describe_exception

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MODEL = ModelConfig().model


class LLM:
    """A model, its workers and its KV cache.

        with LLM("smollm2", max_model_len=2048, record="runs") as llm:
            params = SamplingParams(temperature=0.8, max_tokens=64)
            for output in llm.generate(["One day", "At night"], params):
                print(output.prompt, output.outputs[0].text)

    `model` is what `eventlm serve --model` takes. `tokenizer`, if given, is another model whose tokenizer is used.
    `seed` makes the calls of one LLM repeatable where their parameters bring no seed. `data_parallel_size` is vLLM's
    name of `replicas`. `options` are those of the configuration by name, such as `dtype`, `max_model_len`,
    `max_num_seqs`, `policy` or `kv_memory`: `eventlm serve --help` lists them. With `record`, the run is recorded in
    that folder, see `run_folder`.

    Calls may come from several threads at once. The workers end with `shutdown`, with the object, and with the program,
    however that ends. An LLM cannot be used in a fork of the process that made it.

    Raises UsageError, CheckpointError or PullError for a model or an option that cannot be had, and
    EngineUnavailableError if the workers do not start.
    """

    def __init__(
        self,
        model: StrPath = DEFAULT_MODEL,
        *,
        tokenizer: StrPath | None = None,
        seed: int | None = None,
        data_parallel_size: int | None = None,
        record: StrPath | None = None,
        **options: Any,
    ) -> None:
        _log_to_stderr()
        given = {"model": model, "replicas": data_parallel_size, "record": record} | options
        with keywords_in_errors():
            composition, self._tokenizer_folder = compose_from(given, tokenizer=tokenizer)
        for warning in composition.warnings:
            warnings.warn(in_keywords(warning), stacklevel=2)
        self._composition = composition
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._builder = RequestBuilder(
            composition.engine,
            composition.tokenizer,
            defaults=composition.defaults,
            vocab_size=composition.vocab_size,
        )
        self._seed = seed
        self._seed_numbers = itertools.count()
        self._request_ids = itertools.count()
        self._thread = EngineThread(composition.engine)
        # Runs at the end of the program at the latest. It must not refer to this object, which may be collected before.
        self._shutdown = weakref.finalize(self, self._thread.stop)
        if multiprocessing.parent_process() is not None:
            # Child processes of multiprocessing run these finalizers at their end.
            multiprocessing.util.Finalize(None, self._shutdown, exitpriority=0)
        try:
            with keywords_in_errors():
                self._thread.start_engine()
        except BaseException:
            self._shutdown()
            raise

    @property
    def run_folder(self) -> Path | None:
        """The folder with the run's `trace.jsonl`. None without `record`."""
        return self._composition.engine.run_folder

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; an output for each, in their order.

        A prompt is a text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`. `sampling_params` is
        one for all or one for each; None is `get_default_sampling_params()`. `priority` has an integer for each prompt,
        lower ones go first. `lora_request` must be None.

        Raises InputError before anything runs if one of the prompts is wrong or too long, and
        EngineUnavailableError if the workers are lost for good. Ctrl-C ends the call and leaves the LLM usable.
        """
        _check_no_lora(lora_request)
        parsed = parse_prompts(prompts, self._composition.tokenizer, self._composition.vocab_size)
        return self._generate(parsed, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several: lists of `{"role": ..., "content": ...}`.

        `chat_template` is a Jinja template in place of the model's own. With `continue_final_message` and without
        `add_generation_prompt` the last message is not closed, so that the model goes on with it. The rest is as for
        `generate`.
        """
        _check_no_lora(lora_request)
        prompts = render_conversations(
            messages,
            self._composition.tokenizer,
            self._composition.vocab_size,
            chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._generate(prompts, sampling_params, use_tqdm, priority)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
        lora_request: None = None,
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt that a beam search finds, best first.

        Prompts are as for `generate`, and so are the errors.
        """
        _check_no_lora(lora_request)
        parsed = parse_prompts(prompts, self._composition.tokenizer, self._composition.vocab_size)
        params = params.checked()
        sampling = self._builder.resolve(params.sampling)
        group = [self._request(prompt, sampling, beams=params.settings) for prompt in parsed]
        outputs = self._run(parsed, group, use_tqdm)
        tokenizer = self._composition.tokenizer
        return [beam_search_output(each, params, tokenizer) for each in outputs if isinstance(each, RequestOutput)]

    def embed(
        self, prompts: PromptType | Sequence[PromptType], *, use_tqdm: UseTqdm = True
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, of length 1: the model's last hidden state at the last token of the prompt.

        Prompts are as for `generate`, and so are the errors.
        """
        parsed = parse_prompts(prompts, self._composition.tokenizer, self._composition.vocab_size)
        params = self._builder.resolve(SamplingParams(max_tokens=None))
        group = [self._request(prompt, params, kind="pool") for prompt in parsed]
        outputs = self._run(parsed, group, use_tqdm)
        return [output for output in outputs if isinstance(output, EmbeddingRequestOutput)]

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """transformers' tokenizer of the model. Raises UsageError for the fake model, which has none."""
        if self._tokenizer_folder is None:
            raise UsageError("the fake model has no tokenizer that transformers knows")
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_folder)
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters in the model's generation_config.json, with vLLM's defaults for the rest."""
        return structs.replace(self._composition.defaults, eos_token_ids=())

    def shutdown(self) -> None:
        """End the workers and close the record. Harmless when called twice."""
        self._shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "" if self._shutdown.alive else ", shut down"
        return f"LLM({self._composition.engine.model_names[0]!r}{state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be sent to another process: its workers belong to this one; make one there")

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: UseTqdm,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = self._params_for_each(sampling_params, len(prompts))
        priorities = _priority_for_each(priority, len(prompts))
        # Often one object stands for all prompts.
        resolved: dict[int, SamplingParams] = {}
        group = []
        for prompt, each, number in zip(prompts, params, priorities, strict=True):
            if id(each) not in resolved:
                resolved[id(each)] = self._resolved(each)
            ready = resolved[id(each)]
            if ready.seed is None and self._seed is not None:
                ready = structs.replace(ready, seed=self._draw_seed())
            group.append(self._request(prompt, ready, priority=number))
        outputs = self._run(prompts, group, use_tqdm)
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """The parameters as workers take them. Raises InputError."""
        params = self._builder.resolve(params)
        if params.n > 1 and params.temperature == 0:
            raise InputError("n", f"n is {params.n} at temperature 0: all completions would be the same")
        grammar = ""
        if params.structure is not None:
            grammar = self._builder.grammars.check_now(structured_outputs_grammar(params.structure))
        bad_words = bad_words_token_ids(self._composition.tokenizer, params.bad_words or ())
        return structs.replace(params, bad_words_token_ids=bad_words, grammar=grammar)

    def _request(self, prompt: Prompt, params: SamplingParams, **more: Any) -> Request:
        return self._builder.request(
            params,
            prompt.token_ids,
            param=prompt.param,
            cache_salt=prompt.cache_salt,
            offline=True,
            received_ns=self._composition.engine.now_ns(),
            **more,
        )

    def _draw_seed(self) -> int:
        """The next seed of this LLM's own stream."""
        digest = blake2b(f"{self._seed}/{next(self._seed_numbers)}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _params_for_each(self, given: object, num_prompts: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
            raise InputError(
                "sampling_params", f"sampling_params must be a SamplingParams or a list of them, got {given!r}"
            )
        if len(given) != num_prompts:
            raise InputError("sampling_params", f"there are {num_prompts} prompts, but {len(given)} sampling_params")
        return list(given)

    def _run(self, prompts: list[Prompt], group: list[Request], use_tqdm: UseTqdm) -> list[AnyRequestOutput]:
        """Run a group and return its outputs in order. An interruption cancels the group."""
        request_ids = [str(next(self._request_ids)) for _ in prompts]
        if not group:
            return []
        composition = self._composition
        collector = Collector(prompts, group, request_ids, composition.tokenizer)
        whole: queue.SimpleQueue[tuple[int, AnyRequestOutput] | None] = queue.SimpleQueue()

        async def work() -> None:
            generation = await submit(composition.engine, composition.tokenizer, group)
            await collect(generation, collector, whole.put)

        outputs: dict[int, AnyRequestOutput] = {}
        with Progress(use_tqdm, len(group)) as progress:
            running = self._thread.submit(work())
            try:
                running.add_done_callback(lambda _: whole.put(None))
                while (item := next_item(whole)) is not None:
                    outputs[item[0]] = item[1]
                    progress.add(item[1])
            except BaseException:
                running.cancel()
                raise
        self._thread.result(running)
        return [outputs[index] for index in range(len(group))]


def _check_no_lora(given: object) -> None:
    if given is not None:
        raise InputError("lora_request", "lora_request must be None: adapters are not supported yet")


def _priority_for_each(given: Sequence[int] | None, num_prompts: int) -> list[int]:
    if given is None:
        return [0] * num_prompts
    if not isinstance(given, Sequence) or not all(
        isinstance(each, int) and not isinstance(each, bool) and -(2**31) <= each < 2**31 for each in given
    ):
        raise InputError("priority", f"priority must be a list of 32-bit integers, one for each prompt, got {given!r}")
    if len(given) != num_prompts:
        raise InputError("priority", f"there are {num_prompts} prompts, but {len(given)} priorities")
    return list(given)


def _log_to_stderr() -> None:
    """Send warnings and errors to stderr, unless the program has configured structlog itself."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            describe_exception,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Notebooks and tests replace stderr, so look it up for each event.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
