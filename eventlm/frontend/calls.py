"""What front ends may ask of the engine: one line for each question, and for each word that has no answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from msgspec import structs

from eventlm.engine.request import OnOutput, ResumedReply
from eventlm.frontend.protocol import (
    Administer,
    AskExplanation,
    AskStatus,
    CancelReply,
    CancelRequest,
    EndText,
    Leave,
    Question,
    ReadMetrics,
    Resume,
    Submit,
    Submitted,
    Word,
)
from eventlm.metrics.components import EngineMetrics, FrontEndMetrics

if TYPE_CHECKING:
    from eventlm.engine.inference_engine import InferenceEngine

#: Gets the number of the front end that asks, the question, and where outputs go if it has any.
Handler = Callable[[int, Any, OnOutput], Awaitable[Any]]


class FrontEndCalls:
    """Answers questions. `figures` are those of all front ends."""

    def __init__(self, engine: InferenceEngine, figures: Callable[[], list[FrontEndMetrics]]) -> None:
        self._engine = engine
        self._figures = figures
        self._handlers: dict[type[Any], Handler] = {
            Submit: self._submit,
            Resume: self._resume,
            CancelReply: lambda _, asked, __: engine.cancel_reply(asked.reply_id, asked.owner),
            AskStatus: lambda _, asked, __: engine.status(asked.reply_id, asked.owner),
            AskExplanation: lambda _, asked, __: engine.explain(asked.reply_id, asked.owner),
            ReadMetrics: self._read_metrics,
            Administer: lambda _, asked, __: engine.administer(asked.action),
        }
        self._listeners: dict[type[Any], Callable[[Any], None]] = {
            CancelRequest: lambda word: engine.cancel(word.request, word.reason),
            EndText: lambda word: engine.end_text(word.request, word.index, word.position, word.reason),
            Leave: lambda word: engine.leave(word.reply_id, word.reader),
        }

    async def answer(self, front_end: int, question: Question, on_output: OnOutput) -> Any:
        """What msgpack can carry. Raises what the engine raises."""
        return await self._handlers[type(question)](front_end, question, on_output)

    def hear(self, word: Word) -> None:
        """Take what has no answer. What it is about may have ended."""
        self._listeners[type(word)](word)

    async def _submit(self, front_end: int, asked: Submit, on_output: OnOutput) -> Submitted:
        group = [structs.replace(request, front_end=front_end) for request in asked.group]
        handles = await self._engine.submit(group, submission=asked.submission, on_output=on_output)
        return Submitted([handle.request for handle in handles], handles[0].rate_limits if handles else None)

    async def _resume(self, front_end: int, asked: Resume, on_output: OnOutput) -> ResumedReply:
        return await self._engine.resume(asked.reply_id, asked.owner, on_output, asked.limits)

    async def _read_metrics(self, front_end: int, asked: ReadMetrics, on_output: OnOutput) -> EngineMetrics:
        return structs.replace(await self._engine.read_metrics(), front_ends=self._figures())
