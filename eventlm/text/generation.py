"""A group of requests that is being generated: tokens become text, and ends of the text go to the engine."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from eventlm.engine.backend import AnswerUsage
from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.engine.request import (
    CLIENT_LEFT,
    ClosingOutput,
    FinishedOutput,
    IdempotencyKey,
    PromptLogprobsOutput,
    Request,
    RequestHandle,
    RequestOutput,
    ResumedReply,
    Submission,
    TextOutput,
    TokensOutput,
)
from eventlm.errors import EventLMError
from eventlm.metrics.rows import RequestRow
from eventlm.text.beam_search.search import submit_searches
from eventlm.text.choice_output import ChoiceOutput, Portion, part_of
from eventlm.text.engine import Engine
from eventlm.text.generated_sequence import GeneratedSequence, generated_sequences
from eventlm.text.output_queue import OutputQueue
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import NO_FORMATS, Formats

Called = TypeVar("Called")
Made = TypeVar("Made")
#: At most so many outputs are joined into one chunk of a stream.
MAX_OUTPUTS_TAKEN = 64


class UsageCounts(NamedTuple):
    """Token counts of a reply. Each prompt counts once, whatever its `n` is.

    cached: tokens of the prompt from the prefix cache. reasoning: tokens of the completion that are reasoning; None if
    there is no reasoning.
    """

    prompt: int
    completion: int
    cached: int
    reasoning: int | None


async def submit(
    engine: Engine,
    tokenizer: Tokenizer,
    group: Sequence[Request],
    submission: Submission | None = None,
    formats: Formats = NO_FORMATS,
) -> Generation:
    """Submit a group to the engine; a beam search for each of its requests if they ask for that. If the caller is
    cancelled meanwhile, the group is too.
    """
    outputs = OutputQueue()
    submit_group = partial(submit_searches, engine) if any(each.beams for each in group) else engine.submit

    def cancel(handles: list[RequestHandle]) -> None:
        if submission is not None and submission.is_resumable:
            engine.leave(submission.reply_id, 0)
        for handle in handles:
            handle.cancel()

    return await attach(
        submit_group(group, submission=submission, on_output=outputs.put),
        lambda handles: Generation(tokenizer, group, handles, outputs, formats, now_ns=engine.now_ns),
        cancel,
    )


async def resume(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str | IdempotencyKey,
    owner: str,
    formats: Formats = NO_FORMATS,
    limits: RateLimits = NO_LIMITS,
    text_of: Callable[[str], tuple[Tokenizer, Formats]] | None = None,
) -> tuple[ResumedReply, Generation]:
    """Read a reply again from its start. The generation reports no ends of texts: that is for the first reader.

    name: an id of the reply, or its key. text_of: the tokenizer and the formats of a model, where several are served.
    Raises UnknownReplyError, RateLimitError, or KeyReusedError for the key of a reply to another request. If the caller
    is cancelled meanwhile, the reader leaves.
    """
    outputs = OutputQueue()

    def make(reply: ResumedReply) -> tuple[ResumedReply, Generation]:
        handles = [
            RequestHandle(seq, request.n, _ignore, _ignore)
            for seq, request in zip(reply.requests, reply.group, strict=True)
        ]
        text = (tokenizer, formats) if text_of is None else text_of(reply.group[0].scheduling.model)
        return reply, Generation(text[0], reply.group, handles, outputs, text[1], now_ns=engine.now_ns)

    if isinstance(name, str):
        calling = engine.resume(name, owner, outputs.put_again, limits)
    else:
        calling = engine.join(name, owner, outputs.put_again, limits)
    return await attach(
        calling,
        make,
        lambda reply: engine.leave(reply.submission.reply_id, reply.reader),
    )


async def attach(
    calling: Coroutine[Any, Any, Called], make: Callable[[Called], Made], undo: Callable[[Called], None]
) -> Made:
    """What `make` returns for the result of a call. The call is carried out even if the caller is cancelled meanwhile;
    the result is undone if there is no use for it.
    """
    call = asyncio.ensure_future(calling)
    try:
        return make(await asyncio.shield(call))
    except BaseException:

        def undo_result(_: object) -> None:
            if not call.cancelled() and call.exception() is None:
                undo(call.result())

        if call.done():
            undo_result(call)
        else:
            call.add_done_callback(undo_result)
        raise


def _ignore(*_: object) -> None:
    """What a reader does instead of calling the engine."""


class Generation:
    """The text of a group, read by `take` or `outputs` until it is over or `cancel` ends it.

    num_outputs: the engine's outputs taken so far; num_tokens: tokens of all choices in them. finish_reasons and rows:
    of the choices that are over, with their metrics by choice. first_token_ns: when the first token of any choice
    came, by the engine's clock; 0 before. joins_outputs, most_outputs: whether outputs that wait together are joined,
    and how many are taken at once; may be set before the first is taken.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        group: Sequence[Request],
        handles: Sequence[RequestHandle],
        outputs: OutputQueue,
        formats: Formats = NO_FORMATS,
        *,
        now_ns: Callable[[], int],
    ) -> None:
        self._now_ns = now_ns
        self.joins_outputs = True
        self.most_outputs = MAX_OUTPUTS_TAKEN
        self.group = group
        self.handles = handles
        self.num_outputs = 0
        self._outputs = outputs
        self.first_token_ns = 0
        self.num_tokens = 0
        self.finish_reasons: Counter[str] = Counter()
        self.rows: dict[int, RequestRow] = {}
        self._sequences = [generated_sequences(tokenizer, request, formats) for request in group]
        self._unfinished = [request.n for request in group]
        self._first_choice = list(itertools.accumulate((request.n for request in group), initial=0))
        #: Outputs and errors read before `take` was called for them.
        self._ahead: deque[Portion | EventLMError] = deque()
        #: Of each request; a backend may correct it at the end.
        self._prompt_tokens = [len(request.prompt_token_ids) for request in group]
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.num_choices = self._first_choice[-1]

    @property
    def is_over(self) -> bool:
        """Whether everything was taken. Failed requests have no more outputs."""
        if self._ahead:
            return False
        failed = self._outputs.failed
        if failed:
            return all(not left or index in failed for index, left in enumerate(self._unfinished))
        return not any(self._unfinished)

    @property
    def knows_cached_tokens(self) -> bool:
        """Whether every choice has ended, so that all counts of cached tokens are in."""
        return not any(self._unfinished)

    async def outputs(self) -> AsyncGenerator[ChoiceOutput]:
        """The outputs of all choices as they come. Iterate over them once."""
        while not self.is_over:
            for output in await self.take():
                yield output

    async def take(self, *, least: int = 1, most: int | None = None) -> list[ChoiceOutput]:
        """The next `least` to `most` outputs of the engine, joined into one for each choice unless they must not be.
        most: `most_outputs` if not given.

        Raises TakenOverError, and what the engine raises.
        """
        most = most or self.most_outputs
        if self._ahead:
            ahead = self._ahead.popleft()
            if isinstance(ahead, EventLMError):
                raise ahead
            self.num_outputs += ahead.num_outputs
            return self._joined(ahead)
        if len(self._outputs) < least:
            await self._outputs.wait(least)
        elif len(self._outputs) > most:
            # A reader with a long backlog must not block others.
            await asyncio.sleep(0)
        taken = self._outputs.take(most)
        self.num_outputs += len(taken)
        if len(taken) == 1:
            found = self._take(*taken[0])
            return [] if found is None else [found]
        portion = Portion()
        self._read(portion, taken)
        return self._joined(portion)

    def _joined(self, portion: Portion) -> list[ChoiceOutput]:
        return portion.joined() if self.joins_outputs else portion.outputs

    async def read_until(self, done: Awaitable[None]) -> None:
        """Await `done` and keep the outputs that come meanwhile for `take`, so that ends of texts are found in time.

        Raises what `done` raises.
        """
        waiting = asyncio.ensure_future(done)
        try:
            while any(self._unfinished) and not waiting.done():
                arriving = asyncio.ensure_future(self._outputs.wait(1))
                try:
                    await asyncio.wait({waiting, arriving}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    arriving.cancel()
                if not waiting.done():
                    self._read_ahead()
            await waiting
        except Exception:
            # The error is reported over the same connection, so `done` must end first.
            await waiting
            raise
        finally:
            waiting.cancel()

    def _read_ahead(self) -> None:
        """Keep the next outputs, as one portion at most, or the next error."""
        last = self._ahead[-1] if self._ahead else None
        portion = last if isinstance(last, Portion) and last.num_outputs < self.most_outputs else Portion()
        try:
            taken = self._outputs.take(self.most_outputs - portion.num_outputs)
        except EventLMError as error:
            # The text of a stream that another reader has taken over goes on after this.
            self._ahead.append(error)
            return
        if portion is not last:
            self._ahead.append(portion)
        self._read(portion, taken)

    def _read(self, portion: Portion, taken: list[tuple[int, RequestOutput]]) -> None:
        portion.num_outputs += len(taken)
        for index, output in taken:
            found = self._take(index, output)
            if found is not None:
                portion.outputs.append(found)

    def cancel(self, reason: str = CLIENT_LEFT) -> None:
        """End the requests of the group that are not over."""
        for unfinished, handle in zip(self._unfinished, self.handles, strict=True):
            if unfinished:
                handle.cancel(reason)

    def token_counts(self) -> UsageCounts:
        """Of all choices that are over."""
        return UsageCounts(
            sum(self._prompt_tokens),
            self._completion_tokens,
            self._cached_tokens,
            _sum_of_known(sequence.num_reasoning_tokens for sequence in itertools.chain.from_iterable(self._sequences)),
        )

    def token_counts_of(self, output: ChoiceOutput) -> UsageCounts:
        """Of one choice up to this output. Cached tokens of a prompt count once its first choice has ended."""
        return UsageCounts(
            self._prompt_tokens[self._request_of(output.choice)],
            output.num_tokens,
            self._cached_tokens,
            output.num_reasoning_tokens,
        )

    def beginning(self, choice: int) -> ChoiceOutput:
        """An empty output of a choice."""
        index = self._request_of(choice)
        return self._sequences[index][choice - self._first_choice[index]].output(choice)

    def _request_of(self, choice: int) -> int:
        return bisect.bisect_right(self._first_choice, choice) - 1

    def _take(self, request: int, output: RequestOutput) -> ChoiceOutput | None:
        """What an output adds to its choice, if anything."""
        choice = self._first_choice[request] + output.index
        sequence = self._sequences[request][output.index]
        if isinstance(output, TokensOutput):
            return self._take_tokens(request, choice, sequence, output)
        if isinstance(output, FinishedOutput):
            return self._finish(request, choice, sequence, output)
        if isinstance(output, TextOutput):
            return self._take_text(choice, sequence, output)
        if isinstance(output, ClosingOutput):
            text = self._close(request, sequence, output)
            return sequence.output(choice, text) if text else None
        if isinstance(output, PromptLogprobsOutput):
            logprobs = sequence.new_prompt_logprobs(output)
            return sequence.output(choice, prompt_logprobs=logprobs) if logprobs is not None else None
        return sequence.output(choice, embedding=output.embedding)

    def _take_tokens(
        self, request: int, choice: int, sequence: GeneratedSequence, output: TokensOutput
    ) -> ChoiceOutput | None:
        """The text of the tokens up to its end. The engine is informed of the end."""
        if sequence.text.is_closed:
            return None
        if not self.first_token_ns:
            self.first_token_ns = self._now_ns()
        before = sequence.text.num_tokens
        text = sequence.text.push(output.token_ids)
        num_kept = sequence.text.num_tokens - before
        sequence.num_tokens += num_kept
        self.num_tokens += num_kept
        token_ids = output.token_ids[:num_kept]
        sequence.last_token_id = token_ids[-1]
        if sequence.reasoning is not None:
            sequence.reasoning.push(token_ids)
        if sequence.text.stop_position is not None:
            self.handles[request].text_ended(output.index, sequence.text.stop_position, sequence.text.end_reason)
        return sequence.output(choice, text, token_ids=token_ids, logprobs=part_of(output.logprobs, 0, num_kept))

    def _take_text(self, choice: int, sequence: GeneratedSequence, output: TextOutput) -> ChoiceOutput:
        """What a backend's answer goes on with."""
        delta = output.delta
        if not self.first_token_ns:
            self.first_token_ns = self._now_ns()
        sequence.num_tokens = output.start + delta.num_tokens
        self.num_tokens += delta.num_tokens
        return sequence.output(choice, delta.text, token_ids=delta.token_ids, embedding=delta.embedding, delta=delta)

    def _close(self, request: int, sequence: GeneratedSequence, output: ClosingOutput) -> str:
        """The rest of the text. The engine is informed where it ends, unless it knows."""
        was_ended = sequence.text.stop_position is not None
        text = sequence.text.close()
        if not was_ended and sequence.text.stop_position is not None:
            self.handles[request].text_ended(output.index, sequence.text.stop_position, sequence.text.end_reason)
        elif not was_ended:
            self.handles[request].text_ended(output.index, output.position)
        return text

    def _finish(self, request: int, choice: int, sequence: GeneratedSequence, output: FinishedOutput) -> ChoiceOutput:
        self._unfinished[request] -= 1
        if output.row is not None:
            self.rows[choice] = output.row
        usage = output.usage or AnswerUsage()
        sequence.num_tokens = _known(usage.completion, output.position)
        self._completion_tokens += sequence.num_tokens
        self.finish_reasons[output.reason] += 1
        # A prompt counts once, with its first sample, which may have had to compute it.
        if output.index == 0:
            self._cached_tokens += _known(usage.cached, output.cached_tokens)
            self._prompt_tokens[request] = _known(usage.prompt, self._prompt_tokens[request])
        if usage.reasoning >= 0:
            sequence.num_reported_reasoning_tokens = usage.reasoning
        text = sequence.text.close()
        if self.group[request].forwarded is not None:
            stop_reason = output.stop_reason
        else:
            stop_reason = sequence.last_token_id if output.reason == "stop_token" else sequence.text.stop_string
        return sequence.output(choice, text, finished=output, stop_reason=stop_reason)


def _known(reported: int, own: int) -> int:
    """What a backend reports; our own count if it says nothing."""
    return own if reported < 0 else reported


def _sum_of_known(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
