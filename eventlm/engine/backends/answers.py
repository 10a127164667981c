"""The answers of other servers that are under way: what has been shown of each, as facts and as outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from eventlm.engine.backend import (
    AnswerDelta,
    AnswerEnd,
    AnswerUsage,
    AttemptId,
    BackendError,
    BackendFailure,
    ForwardedRequest,
)
from eventlm.engine.request import FinishedOutput, Request, TextOutput
from eventlm.events import Forwarded, ForwardEnded, ForwardFailed, Relayed, Streamed
from eventlm.types import SequenceId


class Answer(Struct):
    """The answer for one sequence, by all of its attempts. seed: of the sequence. prompt_tokens: of its prompt, as they
    are counted here. num_tokens, texts, token_ids: what was shown; token_ids None: a server did not tell all of them.
    is_plain: whether that is text alone, so that another attempt can go on from it. is_counted: whether num_tokens is
    certain. num_before: tokens before the present attempt. ended: its end, once it has come. failure:
    of the latest attempt that failed.
    """

    request: ForwardedRequest
    seed: int
    prompt_tokens: int
    num_tokens: int = 0
    num_before: int = 0
    texts: list[str] = []
    token_ids: list[int] | None = []
    is_plain: bool = True
    is_counted: bool = True
    ended: AnswerEnd | None = None
    failure: BackendFailure | None = None

    def count(self, deltas: Iterable[AnswerDelta]) -> int:
        """Its tokens with these. Not every event of a stream has a token, but what is shown counts as one at least."""
        return max(self.num_tokens + sum(delta.num_tokens for delta in deltas), 1)

    def show(self, delta: AnswerDelta) -> None:
        """It goes on with this."""
        self.num_tokens = self.count([delta])
        self.texts.append(delta.text)
        self.is_counted &= delta.is_counted
        if self.token_ids is not None:
            self.token_ids += delta.token_ids
            if len(self.token_ids) != self.num_tokens:
                self.token_ids = None
        if delta.reasoning or delta.calls or delta.logprobs or delta.embedding:
            self.is_plain = False


class Answers:
    """All of an engine, by sequence, from their arrival on."""

    def __init__(self) -> None:
        self._answers: dict[SequenceId, Answer] = {}
        #: What the rows of the latest `streamed` fact go on with.
        self._streamed: list[tuple[SequenceId, list[AnswerDelta]]] = []

    def add(self, seq: int, request: Request) -> None:
        """A request has arrived with this number; nothing if it is not forwarded."""
        if request.forwarded is None:
            return
        for index in range(request.n):
            seed = (request.sampling.noise_seed + index) % 2**63
            self._answers[SequenceId(seq, index)] = Answer(request.forwarded, seed, len(request.prompt_token_ids))

    def keep(self, identities: Iterable[SequenceId]) -> list[tuple[int, Answer]]:
        """Those of these sequences of a request, by their index."""
        return [(each.index, self._answers[each]) for each in identities if each in self._answers]

    def restore(self, seq: int, kept: Iterable[tuple[int, Answer]]) -> None:
        """Take those of a request over from another engine."""
        for index, answer in kept:
            self._answers[SequenceId(seq, index)] = answer

    def forget(self, identity: SequenceId) -> None:
        """A sequence was not admitted."""
        self._answers.pop(identity, None)

    def begin(self, forwarded: Forwarded) -> Answer:
        """An attempt begins, which goes on from what the answer has now."""
        answer = self._answers[SequenceId(forwarded.request, forwarded.index)]
        answer.num_before = answer.num_tokens
        return answer

    def stream(self, deltas: Mapping[AttemptId, list[AnswerDelta]]) -> Streamed:
        """The fact that answers went on. What they bring is kept until the core decides which of them count."""
        rows = []
        self._streamed = []
        for name, added in deltas.items():
            identity = SequenceId(name.request, name.index)
            answer = self._answers.get(identity)
            if answer is not None:
                rows.append((*name, answer.count(added)))
                self._streamed.append((identity, added))
        return Streamed(rows=rows)

    def relay(self, relayed: Relayed) -> list[tuple[SequenceId, TextOutput]]:
        """What was streamed by attempts that count."""
        shown = []
        dropped = set(relayed.dropped)
        for row, (identity, deltas) in enumerate(self._streamed):
            answer = self._answers.get(identity)
            if row in dropped or answer is None:
                continue
            for delta in deltas:
                shown.append((identity, TextOutput(identity.index, answer.num_tokens, delta)))
                answer.show(delta)
        self._streamed = []
        return shown

    def end(self, name: AttemptId, ended: AnswerEnd) -> ForwardEnded:
        """The fact that an answer is complete."""
        answer = self._answers.get(SequenceId(name.request, name.index))
        num_tokens = 0
        if answer is not None:
            ended = structs.replace(ended, usage=_of_whole(ended.usage, answer.num_before))
            answer.ended = ended
            num_tokens = max(ended.usage.completion, answer.num_tokens)
        return ForwardEnded(
            request=name.request,
            index=name.index,
            attempt=name.attempt,
            reason=ended.reason,
            num_tokens=num_tokens,
            prompt_tokens=ended.usage.prompt,
            cached_tokens=ended.usage.cached,
        )

    def fail(self, name: AttemptId, error: BackendError, *, can_continue: bool) -> ForwardFailed:
        """The fact that an attempt has failed. can_continue: whether another one can go on from what was shown."""
        self.note_failure(name, error.failure)
        return ForwardFailed(
            request=name.request,
            index=name.index,
            attempt=name.attempt,
            kind=error.kind,
            status=error.status,
            retry_after_ns=error.retry_after_ns,
            can_continue=can_continue,
        )

    def note_failure(self, name: AttemptId, failure: BackendFailure) -> None:
        """Keep why an attempt failed: it is told if it was the last."""
        answer = self._answers.get(SequenceId(name.request, name.index))
        if answer is not None:
            answer.failure = failure

    def finish(self, identity: SequenceId, output: FinishedOutput) -> FinishedOutput:
        """A sequence is over: its last output with what the server said, if it was forwarded."""
        answer = self._answers.pop(identity, None)
        if answer is None:
            return output
        if answer.ended is not None:
            return structs.replace(output, usage=answer.ended.usage, stop_reason=answer.ended.stop_reason)
        return structs.replace(output, failure=answer.failure) if output.reason == "error" else output


def _of_whole(usage: AnswerUsage, num_before: int) -> AnswerUsage:
    """The counts of a whole answer. To the backend that went on with it, what was shown before was prompt."""
    if not num_before:
        return usage
    prompt = max(usage.prompt - num_before, -1)
    completion = usage.completion + num_before if usage.completion >= 0 else -1
    return structs.replace(usage, prompt=prompt, completion=completion, cached=min(usage.cached, prompt))
