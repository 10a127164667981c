"""What is new of the choices of a reply, and how several such pieces become one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from eventlm.engine.request import FinishedOutput
from eventlm.sampling_params import TokenLogprobs
from eventlm.text.generation_error import GenerationError, generation_error
from eventlm.types import FinishReason

T = TypeVar("T")
#: OpenAI's names for how an output ended.
ApiFinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


def api_finish_reason(reason: FinishReason) -> ApiFinishReason:
    """OpenAI's name for the ordinary end of a sequence. A prompt that was only scored had no room for more."""
    if reason == "complete":
        return "length"
    return reason if reason in ("length", "tool_calls") else "stop"


class ChoiceOutput(Struct, frozen=True):
    """What is new of choice `choice` (prompt-major over the group), and how it ended if this is its last output.

    text: safe to show. token_ids, logprobs: of the tokens that belong to the output, which may be ahead of the text.
    prompt_logprobs: of prompt tokens from the second on, in the order of the prompt and each once. embedding:
    little-endian float32. stop_reason: the stop string or the stop token that ended the output, if it was one.
    num_tokens: of the choice so far, with these. num_reasoning_tokens: those of them that are reasoning, None where
    none may be.
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
    """All outputs of one choice, from the first to the last, as one."""
    last = outputs[-1]
    return ChoiceOutput(
        last.choice,
        "".join(output.text for output in outputs),
        [token_id for output in outputs for token_id in output.token_ids],
        _joined([output.logprobs for output in outputs if output.logprobs is not None]),
        _joined([output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]),
        # A prompt that was preempted behind its last chunk is computed again.
        next((output.embedding for output in reversed(outputs) if output.embedding), b""),
        last.finished,
        last.stop_reason,
        last.num_tokens,
        last.num_reasoning_tokens,
    )


async def each_in_turn(make: Callable[[ChoiceOutput], T], outputs: Sequence[ChoiceOutput]) -> list[T]:
    """What is made of each output; others have their turn between, for log-probabilities take milliseconds."""
    made: list[T] = []
    for output in outputs:
        if made:
            await asyncio.sleep(0)
        made.append(make(output))
    return made


def part_of(logprobs: TokenLogprobs | None, start: int, end: int | None) -> TokenLogprobs | None:
    """Those from one place to another; to the end without an `end`."""
    if logprobs is None or (start == 0 and end in (None, len(logprobs.logprobs))):
        return logprobs
    return TokenLogprobs(
        logprobs=logprobs.logprobs[start:end],
        ranks=logprobs.ranks[start:end],
        top_ids=logprobs.top_ids[start:end],
        top_logprobs=logprobs.top_logprobs[start:end],
    )


class Portion:
    """What some outputs of the engine say, by the choice, in the order in which the choices are first heard of."""

    __slots__ = ("by_choice", "num_outputs")

    def __init__(self) -> None:
        self.num_outputs = 0
        self.by_choice: dict[int, list[ChoiceOutput]] = {}

    def joined(self) -> list[ChoiceOutput]:
        """One output for each choice."""
        return [join_outputs(outputs) if len(outputs) > 1 else outputs[0] for outputs in self.by_choice.values()]


def _joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return TokenLogprobs(
        logprobs=[value for part in parts for value in part.logprobs],
        ranks=[rank for part in parts for rank in part.ranks],
        top_ids=[ids for part in parts for ids in part.top_ids],
        top_logprobs=[values for part in parts for values in part.top_logprobs],
    )
