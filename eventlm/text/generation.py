"""A group of requests under way: the engine's tokens become text, and the engine hears where the text ends."""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from typing import NamedTuple

from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.engine.request import (
    CLIENT_LEFT,
    ClosingOutput,
    FinishedOutput,
    PromptLogprobsOutput,
    Request,
    RequestHandle,
    RequestOutput,
    ResumedReply,
    Submission,
    TokensOutput,
)
from eventlm.errors import EventLMError
from eventlm.metrics.rows import RequestRow
from eventlm.text.choice_output import ChoiceOutput, Portion, part_of
from eventlm.text.engine import TextEngine
from eventlm.text.generated_sequence import GeneratedSequence, generated_sequences
from eventlm.text.output_queue import OutputQueue
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import NO_FORMATS, Formats

#: What comes at once is joined, but no more than this: of a stream that waited long, it becomes one chunk.
MAX_OUTPUTS_TAKEN = 64


class UsageCounts(NamedTuple):
    """Token counts of a reply. Each prompt counts once, whatever its `n` is.

    `cached` of the prompt's tokens came from the prefix cache; `reasoning` of the completion's are reasoning, None
    where there can be none.
    """

    prompt: int
    completion: int
    cached: int
    reasoning: int | None


async def submit(
    engine: TextEngine,
    tokenizer: Tokenizer,
    group: Sequence[Request],
    submission: Submission | None = None,
    formats: Formats = NO_FORMATS,
) -> Generation:
    """Hand a group to the engine. A caller that is cancelled meanwhile leaves nothing behind in the engine."""
    outputs = OutputQueue()
    submitting = asyncio.ensure_future(engine.submit(group, submission=submission, on_output=outputs.put))
    try:
        handles = await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(functools.partial(_abandon_submitted, engine, submission))
        raise
    try:
        return Generation(tokenizer, group, handles, outputs, formats)
    except BaseException:
        _abandon_submitted(engine, submission, submitting)
        raise


def _abandon_submitted(
    engine: TextEngine, submission: Submission | None, submitting: asyncio.Future[list[RequestHandle]]
) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        if submission is not None and submission.is_resumable:
            engine.leave(submission.reply_id, 0)
        for handle in submitting.result():
            handle.cancel()


async def resume(
    engine: TextEngine,
    tokenizer: Tokenizer,
    reply_id: str,
    owner: str,
    formats: Formats = NO_FORMATS,
    limits: RateLimits = NO_LIMITS,
) -> tuple[ResumedReply, Generation]:
    """Read a reply again from its start: a generation that tells the engine nothing.

    Raises UnknownReplyError, or RateLimitError. A caller that is cancelled meanwhile leaves no reader behind.
    """
    outputs = OutputQueue()
    resuming = asyncio.ensure_future(engine.resume(reply_id, owner, outputs.put_again, limits))
    try:
        reply = await asyncio.shield(resuming)
    except asyncio.CancelledError:
        resuming.add_done_callback(functools.partial(_leave_resumed, engine))
        raise
    handles = [
        RequestHandle(seq, request.n, _say_nothing, _say_nothing)
        for seq, request in zip(reply.requests, reply.group, strict=True)
    ]
    try:
        return reply, Generation(tokenizer, reply.group, handles, outputs, formats)
    except BaseException:
        _leave_resumed(engine, resuming)
        raise


def _leave_resumed(engine: TextEngine, resuming: asyncio.Future[ResumedReply]) -> None:
    if not resuming.cancelled() and resuming.exception() is None:
        engine.leave(resuming.result().submission.reply_id, resuming.result().reader)


def _say_nothing(*_: object) -> None:
    """What the engine must hear of the texts, it hears of the edge that submitted them."""


class Generation:
    """The group's text: `take` or `outputs` gives it, `cancel` ends it when nobody reads any more.

    `num_outputs` counts the engine's outputs that were taken, `num_tokens` the tokens of all choices in them,
    `finish_reasons` the choices that are over; `rows` has what the log says of those. `first_token_ns` (of
    `time.perf_counter_ns`, 0 before) is when the first token of any choice came.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        group: Sequence[Request],
        handles: Sequence[RequestHandle],
        outputs: OutputQueue,
        formats: Formats = NO_FORMATS,
    ) -> None:
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
        #: What was read before anybody took it, and the errors between.
        self._ahead: deque[Portion | EventLMError] = deque()
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.num_choices = self._first_choice[-1]

    @property
    def is_over(self) -> bool:
        """Whether everything was taken. Of requests that have failed nothing more comes."""
        if self._ahead:
            return False
        failed = self._outputs.failed
        if failed:
            return all(not left or place in failed for place, left in enumerate(self._unfinished))
        return not any(self._unfinished)

    @property
    def knows_cached_tokens(self) -> bool:
        """Whether every end has come: only then it is told how much of the prompts was cached."""
        return not any(self._unfinished)

    async def outputs(self) -> AsyncGenerator[ChoiceOutput]:
        """The outputs of all choices as they come, to be iterated over once."""
        while not self.is_over:
            for output in await self.take():
                yield output

    async def take(self, *, least: int = 1, most: int = MAX_OUTPUTS_TAKEN) -> list[ChoiceOutput]:
        """What came since the last call, once it is of `least` outputs of the engine, and of `most` at most.

        There is one item for each choice that something came of. Raises TakenOverError, and what the engine raises.
        """
        if self._ahead:
            ahead = self._ahead.popleft()
            if isinstance(ahead, EventLMError):
                raise ahead
            self.num_outputs += ahead.num_outputs
            return ahead.joined()
        if len(self._outputs) < least:
            await self._outputs.wait(least)
        elif len(self._outputs) > most:
            # Who has much to catch up with lets others have their turn.
            await asyncio.sleep(0)
        taken = self._outputs.take(most)
        self.num_outputs += len(taken)
        if len(taken) == 1:
            found = self._take(*taken[0])
            return [] if found is None else [found]
        portion = Portion()
        self._read(portion, taken)
        return portion.joined()

    async def read_until(self, done: Awaitable[None]) -> None:
        """Wait until something is done, and read what comes meanwhile, in portions for `take`.

        So a text ends where it is to although nobody takes it. Raises what `done` raises.
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
            # Who tells of it must wait for the same, and so it may not be broken off.
            await waiting
            raise
        finally:
            waiting.cancel()

    def _read_ahead(self) -> None:
        """What has come, as far as it makes a portion, or an error if that is next."""
        last = self._ahead[-1] if self._ahead else None
        portion = last if isinstance(last, Portion) and last.num_outputs < MAX_OUTPUTS_TAKEN else Portion()
        try:
            taken = self._outputs.take(MAX_OUTPUTS_TAKEN - portion.num_outputs)
        except EventLMError as error:
            # Of a stream that is taken over the text goes on behind it.
            self._ahead.append(error)
            return
        if portion is not last:
            self._ahead.append(portion)
        self._read(portion, taken)

    def _read(self, portion: Portion, taken: list[tuple[int, RequestOutput]]) -> None:
        portion.num_outputs += len(taken)
        for place, output in taken:
            found = self._take(place, output)
            if found is not None:
                portion.by_choice.setdefault(found.choice, []).append(found)

    def cancel(self, reason: str = CLIENT_LEFT) -> None:
        """End the requests of the group that are not over."""
        for unfinished, handle in zip(self._unfinished, self.handles, strict=True):
            if unfinished:
                handle.cancel(reason)

    def token_counts(self) -> UsageCounts:
        """Of all choices that are over."""
        return UsageCounts(
            sum(len(request.prompt_token_ids) for request in self.group),
            self._completion_tokens,
            self._cached_tokens,
            _sum_of_known(sequence.num_reasoning_tokens for sequence in itertools.chain.from_iterable(self._sequences)),
        )

    def token_counts_of(self, output: ChoiceOutput) -> UsageCounts:
        """Of one choice up to this output. The cached tokens of a prompt count from the end of its first choice on."""
        return UsageCounts(
            len(self.group[self._place_of(output.choice)].prompt_token_ids),
            output.num_tokens,
            self._cached_tokens,
            output.num_reasoning_tokens,
        )

    def beginning(self, choice: int) -> ChoiceOutput:
        """Nothing yet of a choice."""
        place = self._place_of(choice)
        return self._sequences[place][choice - self._first_choice[place]].said(choice)

    def _place_of(self, choice: int) -> int:
        return bisect.bisect_right(self._first_choice, choice) - 1

    def _take(self, place: int, output: RequestOutput) -> ChoiceOutput | None:
        """What an output adds to its choice, if anything."""
        choice = self._first_choice[place] + output.index
        sequence = self._sequences[place][output.index]
        if isinstance(output, TokensOutput):
            return self._take_tokens(place, choice, sequence, output)
        if isinstance(output, FinishedOutput):
            return self._finish(place, choice, sequence, output)
        if isinstance(output, ClosingOutput):
            text = self._close(place, sequence, output)
            return sequence.said(choice, text) if text else None
        if isinstance(output, PromptLogprobsOutput):
            logprobs = sequence.new_prompt_logprobs(output)
            return sequence.said(choice, prompt_logprobs=logprobs) if logprobs is not None else None
        return sequence.said(choice, embedding=output.embedding)

    def _take_tokens(
        self, place: int, choice: int, sequence: GeneratedSequence, output: TokensOutput
    ) -> ChoiceOutput | None:
        """Tokens behind an end of the text do not belong to the output. Tells the engine of such an end."""
        if sequence.text.is_closed:
            return None
        if not self.first_token_ns:
            self.first_token_ns = time.perf_counter_ns()
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
            self.handles[place].text_ended(output.index, sequence.text.stop_position, sequence.text.end_reason)
        return sequence.said(choice, text, token_ids=token_ids, logprobs=part_of(output.logprobs, 0, num_kept))

    def _close(self, place: int, sequence: GeneratedSequence, output: ClosingOutput) -> str:
        """The rest of the text. Tells the engine whether it ends there, unless an end has been told."""
        told = sequence.text.stop_position is not None
        text = sequence.text.close()
        if not told and sequence.text.stop_position is not None:
            self.handles[place].text_ended(output.index, sequence.text.stop_position, sequence.text.end_reason)
        elif not told:
            self.handles[place].text_ended(output.index, output.position)
        return text

    def _finish(self, place: int, choice: int, sequence: GeneratedSequence, output: FinishedOutput) -> ChoiceOutput:
        self._unfinished[place] -= 1
        if output.row is not None:
            self.rows[choice] = output.row
        self._completion_tokens += output.position
        sequence.num_tokens = output.position
        self.finish_reasons[output.reason] += 1
        # A prompt counts once; its first sample is the one that may have had to compute it.
        if output.index == 0:
            self._cached_tokens += output.cached_tokens
        text = sequence.text.close()
        stop_reason = sequence.last_token_id if output.reason == "stop_token" else sequence.text.stop_string
        return sequence.said(choice, text, finished=output, stop_reason=stop_reason)


def _sum_of_known(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
