"""A group of requests under way: the engine's tokens become text, and the engine hears where the text ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import Struct

from eventlm.control.request import (
    ClosingOutput,
    EmbeddingOutput,
    EngineRequest,
    FinishedOutput,
    PromptLogprobsOutput,
    RequestHandle,
    RequestOutput,
    TokensOutput,
)
from eventlm.errors import EventLMError
from eventlm.sampler_params import TokenLogprobs
from eventlm.server.detokenizer import SequenceText
from eventlm.server.engine_protocol import Engine
from eventlm.server.replies import PromptTokensDetails, Usage
from eventlm.server.stop_strings import StopStrings
from eventlm.server.tokenizer import Tokenizer


class ChoiceOutput(Struct, frozen=True):
    """What is new of choice `choice` (prompt-major over the group), and how it ended if this is its last output.

    text: safe to show. token_ids, logprobs: of the tokens that belong to the output, which may be ahead of the text.
    prompt_logprobs: of prompt tokens, in the order of the prompt and each once. embedding: little-endian float32.
    """

    choice: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    embedding: bytes = b""
    finished: FinishedOutput | None = None


async def submit(engine: Engine, tokenizer: Tokenizer, group: Sequence[EngineRequest]) -> Generation:
    """Hand a group to the engine. A caller that is cancelled meanwhile leaves nothing behind in the engine."""
    submission = asyncio.ensure_future(engine.submit(group))
    try:
        handles = await asyncio.shield(submission)
    except asyncio.CancelledError:
        submission.add_done_callback(_cancel_submitted)
        raise
    return Generation(tokenizer, group, handles)


def _cancel_submitted(submission: asyncio.Future[list[RequestHandle]]) -> None:
    if not submission.cancelled() and submission.exception() is None:
        for handle in submission.result():
            handle.cancel()


class Generation:
    """The group's text: `outputs` gives it, `cancel` ends it when nobody reads any more."""

    def __init__(self, tokenizer: Tokenizer, group: Sequence[EngineRequest], handles: Sequence[RequestHandle]) -> None:
        self._group = group
        self._handles = handles
        self._texts = [_sequence_texts(tokenizer, request) for request in group]
        self._unfinished = [request.n for request in group]
        self._first_choice = [sum(request.n for request in group[:place]) for place in range(len(group))]
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.num_choices = sum(request.n for request in group)

    async def outputs(self) -> AsyncGenerator[ChoiceOutput]:
        """The outputs of all choices as they come, to be iterated over once."""
        async with aclosing(_merged(self._handles)) as outputs:
            async for place, output in outputs:
                choice = self._first_choice[place] + output.index
                text = self._advance(place, output)
                if isinstance(output, FinishedOutput):
                    self._finish(place, output)
                    yield ChoiceOutput(choice, text, finished=output)
                elif text:
                    yield ChoiceOutput(choice, text)

    def cancel(self, reason: str = "client") -> None:
        """End the requests of the group that are not over."""
        for unfinished, handle in zip(self._unfinished, self._handles, strict=True):
            if unfinished:
                handle.cancel(reason)

    def usage(self) -> Usage:
        """Token counts of the choices that are over."""
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self._group)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens),
        )

    def _advance(self, place: int, output: RequestOutput) -> str:
        """The text that an output makes safe to send. Tells the engine of an end, once for each sequence."""
        sequence = self._texts[place][output.index]
        if isinstance(output, PromptLogprobsOutput | EmbeddingOutput):
            return ""
        if isinstance(output, FinishedOutput):
            return sequence.close()
        told = sequence.stop_position is not None
        text = sequence.push(output.token_ids) if isinstance(output, TokensOutput) else sequence.close()
        if not told and sequence.stop_position is not None:
            self._handles[place].text_ended(output.index, sequence.stop_position, "stop")
        elif not told and isinstance(output, ClosingOutput):
            self._handles[place].text_ended(output.index, output.position)
        return text

    def _finish(self, place: int, output: FinishedOutput) -> None:
        self._unfinished[place] -= 1
        self._completion_tokens += output.position
        # A prompt counts once; its first sample is the one that may have had to compute it.
        if output.index == 0:
            self._cached_tokens += output.cached_tokens


def _sequence_texts(tokenizer: Tokenizer, request: EngineRequest) -> list[SequenceText]:
    params = request.params
    stops = StopStrings(request.stop) if request.stop else None
    ends = frozenset(params.stop_token_ids + (() if params.ignore_eos else params.eos_token_ids))
    return [SequenceText(tokenizer.token_bytes, stops=stops, end_token_ids=ends) for _ in range(request.n)]


async def _merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The outputs of all handles as they come, each with its handle's place."""
    if len(handles) == 1:
        async for output in handles[0]:
            yield 0, output
        return
    outputs: asyncio.Queue[tuple[int, RequestOutput | EventLMError | None]] = asyncio.Queue()

    async def pump(place: int) -> None:
        try:
            async for output in handles[place]:
                outputs.put_nowait((place, output))
            outputs.put_nowait((place, None))
        except EventLMError as error:
            outputs.put_nowait((place, error))

    pumps = [asyncio.create_task(pump(place)) for place in range(len(handles))]
    try:
        open_handles = len(handles)
        while open_handles:
            place, item = await outputs.get()
            if item is None:
                open_handles -= 1
            elif isinstance(item, EventLMError):
                raise item
            else:
                yield place, item
    finally:
        for task in pumps:
            task.cancel()
