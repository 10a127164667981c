"""What front ends can call on the engine: a handler for each operation and each notification."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from msgspec import structs

from eventlm.engine.request import OnOutput, ResumedReply
from eventlm.frontend.protocol import (
    Administer,
    CancelReply,
    CancelRequest,
    EndText,
    GetExplanation,
    GetMetrics,
    GetStatus,
    LeaveReply,
    Notification,
    Operation,
    ResumeReply,
    Submit,
    Submitted,
)
from eventlm.metrics.components import EngineMetrics, FrontEndMetrics

if TYPE_CHECKING:
    from eventlm.engine.inference_engine import InferenceEngine

#: Takes the number of the calling front end, the operation, and the callback for its outputs, if it has any.
Handler = Callable[[int, Any, OnOutput], Awaitable[Any]]


class FrontEndCalls:
    """Handles the calls of all front ends. `figures` returns their metrics."""

    def __init__(self, engine: InferenceEngine, figures: Callable[[], list[FrontEndMetrics]]) -> None:
        self._engine = engine
        self._figures = figures
        self._handlers: dict[type[Any], Handler] = {
            Submit: self._submit,
            ResumeReply: self._resume,
            CancelReply: lambda _, asked, __: engine.cancel_reply(asked.reply_id, asked.owner),
            GetStatus: lambda _, asked, __: engine.status(asked.reply_id, asked.owner),
            GetExplanation: lambda _, asked, __: engine.explain(asked.reply_id, asked.owner),
            GetMetrics: self._read_metrics,
            Administer: lambda _, asked, __: engine.administer(asked.action),
        }
        self._notified: dict[type[Any], Callable[[Any], None]] = {
            CancelRequest: lambda sent: engine.cancel(sent.request, sent.reason),
            EndText: lambda sent: engine.end_text(sent.request, sent.index, sent.position, sent.reason),
            LeaveReply: lambda sent: engine.leave(sent.reply_id, sent.reader),
        }

    async def answer(self, front_end: int, operation: Operation, on_output: OnOutput) -> Any:
        """Carry out an operation and return a result that msgpack can encode. Raises what the engine raises."""
        return await self._handlers[type(operation)](front_end, operation, on_output)

    def notify(self, notification: Notification) -> None:
        """Handle a notification. The request it concerns may have ended already."""
        self._notified[type(notification)](notification)

    async def _submit(self, front_end: int, asked: Submit, on_output: OnOutput) -> Submitted:
        group = [request.with_scheduling(front_end=front_end) for request in asked.group]
        handles = await self._engine.submit(group, submission=asked.submission, on_output=on_output)
        return Submitted([handle.request for handle in handles], handles[0].rate_limits if handles else None)

    async def _resume(self, front_end: int, asked: ResumeReply, on_output: OnOutput) -> ResumedReply:
        return await self._engine.resume(asked.reply_id, asked.owner, on_output, asked.limits)

    async def _read_metrics(self, front_end: int, asked: GetMetrics, on_output: OnOutput) -> EngineMetrics:
        return structs.replace(await self._engine.read_metrics(), front_ends=self._figures())
