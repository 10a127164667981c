"""The outputs of the choices of a reply, how they are joined, and how a choice ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

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
    """A sequence ended for `reason` before its output was complete; `detail` is as in `FinishedOutput`."""

    def __init__(self, reason: FinishReason, detail: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.detail = detail


def generation_error(finished: FinishedOutput) -> GenerationError | None:
    """The error for the client of a sequence that ended so; None for an ordinary end."""
    message = _message(finished.reason, finished.detail)
    return GenerationError(finished.reason, finished.detail, message) if message else None


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
    None if its format has no reasoning.
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
