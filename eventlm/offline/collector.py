"""Assembles the outputs of each prompt from pieces of text, tokens and log-probabilities."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

from eventlm.engine.request import EngineUnavailableError, FinishedOutput, Request
from eventlm.errors import EventLMError
from eventlm.offline.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobDict,
)
from eventlm.offline.prompts import Prompt
from eventlm.sampling_params import TokenLogprobs
from eventlm.text.choice_output import ChoiceOutput, api_finish_reason, generation_error
from eventlm.text.generation import Generation
from eventlm.text.tokenizer import Tokenizer, token_text

AnyRequestOutput = RequestOutput | EmbeddingRequestOutput


class _Choice:
    """A completion in progress. It keeps the contents of outputs only, since there is one for each token."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.embedding = b""
        self.finished: FinishedOutput | None = None
        self.stop_reason: str | int | None = None

    def add(self, output: ChoiceOutput) -> None:
        self.texts.append(output.text)
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs.append(output.prompt_logprobs)
        self.embedding = output.embedding or self.embedding
        if output.finished is not None:
            self.finished, self.stop_reason = output.finished, output.stop_reason


class Collector:
    """The outputs of one call. `add` takes a piece and returns the prompt's output once it is complete."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        group: Sequence[Request],
        request_ids: Sequence[str],
        tokenizer: Tokenizer,
    ) -> None:
        self._prompts = prompts
        self._group = group
        self._request_ids = request_ids
        self._tokenizer = tokenizer
        #: The request of each choice, and its index in it.
        self._owners = [(number, index) for number, request in enumerate(group) for index in range(request.n)]
        self._choices = [[_Choice() for _ in range(request.n)] for request in group]
        self._unfinished = [request.n for request in group]
        self._arrival_time = time.time()
        self._first_token_times: list[float | None] = [None] * len(group)
        self._token_texts: dict[int, str] = {}

    def add(self, output: ChoiceOutput) -> tuple[int, AnyRequestOutput] | None:
        """Take a piece; the number and the output of the request that it completes. Raises what ended it instead."""
        number, index = self._owners[output.choice]
        self._choices[number][index].add(output)
        if output.token_ids and self._first_token_times[number] is None:
            self._first_token_times[number] = time.time()
        if output.finished is None:
            return None
        _check_end(self._prompts[number], output.finished)
        self._unfinished[number] -= 1
        if self._unfinished[number]:
            return None
        choices, self._choices[number] = self._choices[number], []
        if self._group[number].scheduling.kind == "pool":
            return number, self._embedding(number, choices[0])
        return number, self._completions(number, choices)

    def _embedding(self, number: int, choice: _Choice) -> EmbeddingRequestOutput:
        if not choice.embedding:
            raise EngineUnavailableError("the worker gave no embedding: this model cannot embed")
        return EmbeddingRequestOutput(
            request_id=self._request_ids[number],
            outputs=EmbeddingOutput(_normalized(choice.embedding)),
            prompt_token_ids=self._prompts[number].token_ids,
            num_cached_tokens=choice.finished.cached_tokens if choice.finished else 0,
        )

    def _completions(self, number: int, choices: list[_Choice]) -> RequestOutput:
        prompt, first = self._prompts[number], choices[0]
        prompt_logprobs: list[TokenLogprobDict | None] | None = None
        if self._group[number].sampling.prompt_logprobs is not None:
            prompt_logprobs = [None, *self._logprob_dicts(prompt.token_ids[1:], first.prompt_logprobs)]
        return RequestOutput(
            request_id=self._request_ids[number],
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(number, index, choice) for index, choice in enumerate(choices)],
            num_cached_tokens=first.finished.cached_tokens if first.finished else 0,
            metrics=RequestMetrics(self._arrival_time, self._first_token_times[number], time.time()),
        )

    def _completion(self, number: int, index: int, choice: _Choice) -> CompletionOutput:
        assert choice.finished is not None
        completion = CompletionOutput(index, "".join(choice.texts), choice.token_ids)
        completion.finish_reason = "length" if api_finish_reason(choice.finished.reason) == "length" else "stop"
        completion.stop_reason = choice.stop_reason
        if self._group[number].sampling.logprobs is not None:
            is_named = self._group[number].sampling.logprob_token_ids is not None
            completion.logprobs = self._logprob_dicts(choice.token_ids, choice.logprobs, are_likeliest=not is_named)
            completion.cumulative_logprob = sum(sum(each.logprobs) for each in choice.logprobs)
        return completion

    def _logprob_dicts(
        self, token_ids: Sequence[int], pieces: Sequence[TokenLogprobs], *, are_likeliest: bool = True
    ) -> list[TokenLogprobDict]:
        """One dict for each token: itself first, then the most likely ones, best first; or others, without ranks."""
        dicts: list[TokenLogprobDict] = []
        for piece in pieces:
            tokens = token_ids[len(dicts) : len(dicts) + len(piece.logprobs)]
            dicts += [
                {
                    each: Logprob(logprob, rank if are_likeliest or each == token else None, self._token_text(each))
                    for each, (logprob, rank) in found.items()
                }
                for token, found in zip(tokens, piece.by_token(tokens), strict=True)
            ]
        return dicts

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = token_text(self._tokenizer, token_id)
        return text


def _normalized(embedding: bytes) -> list[float]:
    """Little-endian float32 as numbers, divided by their Euclidean length."""
    values = struct.unpack(f"<{len(embedding) // 4}f", embedding)
    length = math.hypot(*values) or 1.0
    return [value / length for value in values]


def _check_end(prompt: Prompt, finished: FinishedOutput) -> None:
    if finished.reason in ("cancelled", "front_end_lost"):
        raise EngineUnavailableError("this LLM was shut down while it worked")
    if error := generation_error(finished):
        raise EventLMError(f"{prompt.param} could not be completed. {error}")


async def collect(
    generation: Generation, collector: Collector, put: Callable[[tuple[int, AnyRequestOutput]], None]
) -> None:
    """Read a generation to its end, and `put` each output with its number when it is whole.

    However this ends, nothing of the generation goes on. Raises EngineUnavailableError.
    """
    try:
        async with aclosing(generation.outputs()) as outputs:
            async for output in outputs:
                whole = collector.add(output)
                if whole is not None:
                    put(whole)
    finally:
        generation.cancel()
