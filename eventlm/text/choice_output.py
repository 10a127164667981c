"""The outputs of the choices of a reply, how they are joined, and how a choice ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec import Raw, Struct

from eventlm.engine.backend import AnswerDelta, BackendFailure, CallPart
from eventlm.engine.request import BY_OPERATOR, BY_OWNER, LOGITS_NOT_FINITE, FinishedOutput
from eventlm.errors import EventLMError
from eventlm.sampling_params import TokenLogprobs
from eventlm.types import FinishReason

T = TypeVar("T")
#: OpenAI's names for how an output ended.
ApiFinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


def api_finish_reason(reason: FinishReason) -> ApiFinishReason:
    """OpenAI's name for an ordinary end. A prompt that was only scored ends with `length`."""
    if reason == "complete":
        return "length"
    return reason if reason in ("length", "tool_calls") else "stop"


class GenerationError(EventLMError):
    """A sequence ended for `reason` before its output was complete; `detail`, `failure` are as in `FinishedOutput`."""

    def __init__(self, reason: FinishReason, detail: str, message: str, failure: BackendFailure | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.detail = detail
        self.failure = failure


def generation_error(finished: FinishedOutput) -> GenerationError | None:
    """The error for the client of a sequence that ended so; None for an ordinary end."""
    failure = finished.failure
    message = _message(finished.reason, finished.detail) if failure is None else _failure_message(failure)
    return GenerationError(finished.reason, finished.detail, message, failure) if message else None


def _failure_message(failure: BackendFailure) -> str:
    """The backend's own word goes to the client only if it is about the request."""
    match failure.kind:
        case "refused":
            return failure.message
        case "overloaded":
            return "Each backend of this model is overloaded; try again."
        case "timeout":
            return "The backend of this model has fallen silent."
        case "connect":
            return "No backend of this model can be reached."
        case "broken":
            return "The backend of this model has ended its answer too early."
        case "server":
            return "The backend of this model has failed."
        case "protocol":
            return "The backend of this model gave an answer that is none of OpenAI's API."


def _message(reason: FinishReason, detail: str) -> str:
    match reason, detail:
        case "cancelled", _ if detail == BY_OWNER:
            return "This request was cancelled by its owner."
        case "cancelled", _ if detail == BY_OPERATOR:
            return "An operator ended this request."
        case (("cancelled" | "front_end_lost"), _):
            return "The server ended this request before it was complete."
        case "deadline", _:
            return "The request's deadline cannot be met."
        case "error", _ if detail == LOGITS_NOT_FINITE:
            return "The model computed NaN or infinity for this request; the log has more."
        case "error", "":
            return "Each worker process that computed this request was lost, so it was given up."
        case "error", _:
            return f"The model cannot follow the structure that was asked for: {detail}."
        case _:
            return ""


class ChoiceOutput(Struct, frozen=True):
    """The next output of choice `choice` (prompt-major over the group); `finished` in its last one.

    text: safe to show. token_ids, logprobs: of the output's tokens, which may be ahead of the text. prompt_logprobs: of
    prompt tokens from the second on, in order, each once. embedding: little-endian float32. stop_reason: the stop
    string or stop token that ended the output. num_tokens, num_reasoning_tokens: of the choice so far; the latter is
    None if its format has no reasoning. delta: what a backend answered, if this comes from one; its text, tokens and
    embedding are here too.
    """

    choice: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    embedding: bytes = b""
    finished: FinishedOutput | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0
    num_reasoning_tokens: int | None = None
    delta: AnswerDelta | None = None

    @property
    def error(self) -> GenerationError | None:
        """Why the choice ended without a complete output; None while it goes on and at an ordinary end."""
        return None if self.finished is None else generation_error(self.finished)


def join_outputs(outputs: Sequence[ChoiceOutput]) -> ChoiceOutput:
    """Consecutive outputs of one choice as one."""
    last = outputs[-1]
    return ChoiceOutput(
        last.choice,
        "".join(output.text for output in outputs),
        [token_id for output in outputs for token_id in output.token_ids],
        _joined([output.logprobs for output in outputs if output.logprobs is not None]),
        _joined([output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]),
        # A prompt that was preempted after its last chunk is computed again.
        next((output.embedding for output in reversed(outputs) if output.embedding), b""),
        last.finished,
        last.stop_reason,
        last.num_tokens,
        last.num_reasoning_tokens,
        _joined_deltas([output.delta for output in outputs if output.delta is not None]),
    )


async def each_in_turn(make: Callable[[ChoiceOutput], T], outputs: Sequence[ChoiceOutput]) -> list[T]:
    """Apply `make` to each output. The loop turns in between, since log-probabilities take milliseconds."""
    made: list[T] = []
    for output in outputs:
        if made:
            await asyncio.sleep(0)
        made.append(make(output))
    return made


def part_of(logprobs: TokenLogprobs | None, start: int, end: int | None) -> TokenLogprobs | None:
    """The entries from `start` to `end`, or to the last one."""
    if logprobs is None or (start == 0 and end in (None, len(logprobs.logprobs))):
        return logprobs
    return TokenLogprobs(
        logprobs=logprobs.logprobs[start:end],
        ranks=logprobs.ranks[start:end],
        top_ids=logprobs.top_ids[start:end],
        top_logprobs=logprobs.top_logprobs[start:end],
    )


class Portion:
    """Outputs of a few choices in order. num_outputs: the engine's outputs that they come from."""

    __slots__ = ("num_outputs", "outputs")

    def __init__(self) -> None:
        self.num_outputs = 0
        self.outputs: list[ChoiceOutput] = []

    def joined(self) -> list[ChoiceOutput]:
        """One output for each choice, in the order of each choice's first."""
        by_choice: dict[int, list[ChoiceOutput]] = {}
        for output in self.outputs:
            by_choice.setdefault(output.choice, []).append(output)
        return [join_outputs(outputs) if len(outputs) > 1 else outputs[0] for outputs in by_choice.values()]


def _joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return TokenLogprobs(
        logprobs=[value for part in parts for value in part.logprobs],
        ranks=[rank for part in parts for rank in part.ranks],
        top_ids=[ids for part in parts for ids in part.top_ids],
        top_logprobs=[values for part in parts for values in part.top_logprobs],
    )


def _joined_deltas(parts: Sequence[AnswerDelta]) -> AnswerDelta | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    calls: list[CallPart] = []
    for call in (call for part in parts for call in part.calls):
        if calls and calls[-1].index == call.index and not call.name:
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + call.arguments)
        else:
            calls.append(call)
    return AnswerDelta(
        "".join(part.text for part in parts),
        sum(part.num_tokens for part in parts),
        "".join(part.reasoning for part in parts),
        calls,
        [token_id for part in parts for token_id in part.token_ids],
        _joined_json([part.logprobs for part in parts if part.logprobs]),
        next((part.embedding for part in reversed(parts) if part.embedding), b""),
    )


def _joined_json(parts: Sequence[bytes]) -> bytes:
    """Lists as one, or objects of lists as one."""
    if len(parts) < 2:
        return parts[0] if parts else b""
    found = [msgspec.json.decode(part, type=list[Raw] | dict[str, list[Raw] | None]) for part in parts]
    columns: dict[str, list[Raw]] = {}
    entries: list[Raw] = []
    for each in found:
        if isinstance(each, list):
            entries += each
            continue
        for name, values in each.items():
            columns.setdefault(name, []).extend(values or [])
    return msgspec.json.encode(columns or entries)
