"""Sequences that end without completing their output, and what their client is told."""

from __future__ import annotations

from eventlm.engine.request import BY_OPERATOR, BY_OWNER, LOGITS_NOT_FINITE, FinishedOutput
from eventlm.errors import EventLMError
from eventlm.types import FinishReason

_CANCELLED_BY = {
    BY_OWNER: "This request was cancelled by its owner.",
    BY_OPERATOR: "An operator ended this request.",
}


class GenerationError(EventLMError):
    """A sequence ended for `reason` before its output was complete; `detail` is as in `FinishedOutput`."""

    def __init__(self, reason: FinishReason, detail: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.detail = detail


def generation_error(finished: FinishedOutput) -> GenerationError | None:
    """The error that the end of a sequence means for its client; None for an ordinary end."""
    message = _message(finished.reason, finished.detail)
    return GenerationError(finished.reason, finished.detail, message) if message else None


def _message(reason: FinishReason, detail: str) -> str:
    match reason:
        case "cancelled" | "front_end_lost":
            return _CANCELLED_BY.get(detail, "The server ended this request before it was complete.")
        case "deadline":
            return "The request's deadline cannot be met."
        case "error" if detail == LOGITS_NOT_FINITE:
            return "The model computed NaN or infinity for this request; the log has more."
        case "error" if detail:
            return f"The model cannot follow the structure that was asked for: {detail}."
        case "error":
            return "Each worker process that computed this request was lost, so it was given up."
        case _:
            return ""
