"""Responses and their items, in OpenAI's format. Fields that are `UNSET` are left out, those that are None are null."""

from __future__ import annotations

from typing import Any, Literal, Union

from msgspec import UNSET, Struct, UnsetType

from eventlm.server.openai.replies import TokenLogprob
from eventlm.server.responses.protocol import ConversationRef, ItemStatus, ReasoningConfig, TextConfig
from eventlm.server.timings import EventlmReply
from eventlm.text.generation import UsageCounts

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of a message. `annotations` are empty: nothing is searched."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message by the model. It has one part, none while it begins."""

    id: str
    status: ItemStatus
    role: str = "assistant"
    content: list[OutputText]


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call by the model. `arguments` is JSON as the model wrote it; `call_id` is what its output names."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning. It is shown as it is, so there is neither a summary nor anything encrypted."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: None = None


OutputItem = Union[OutputMessage, FunctionCallItem, ReasoningItem]  # noqa: UP007


class InputTokensDetails(Struct, frozen=True):
    """How many tokens of the prompt came from the prefix cache. Writing to it is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """How many tokens of the output were reasoning, without the marks around it."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, counts: UsageCounts) -> ResponseUsage:
        """The usage that a response reports."""
        return cls(
            input_tokens=counts.prompt,
            input_tokens_details=InputTokensDetails(counts.cached),
            output_tokens=counts.completion,
            output_tokens_details=OutputTokensDetails(counts.reasoning or 0),
            total_tokens=counts.prompt + counts.completion,
        )


class ResponseError(Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class Response(Struct, frozen=True, kw_only=True):
    """Reply of `/v1/responses`, and what most events of its stream hold.

    Fields of the request are as it had them, or their defaults. completed_at: null unless the status is `completed`.
    """

    id: str
    object: str = "response"
    created_at: int
    status: ResponseStatus
    background: bool = False
    completed_at: int | None = None
    conversation: ConversationRef | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig
    safety_identifier: str | None = None
    service_tier: str | UnsetType = UNSET
    store: bool = True
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    eventlm: EventlmReply | UnsetType = UNSET


class InputTokens(Struct, frozen=True, kw_only=True):
    """Reply of `/v1/responses/input_tokens`."""

    object: str = "response.input_tokens"
    input_tokens: int
