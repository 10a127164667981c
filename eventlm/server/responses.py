"""Replies in OpenAI's shapes. Fields that are `UNSET` do not appear, those that are None appear as null."""

from __future__ import annotations

import secrets
import time
from typing import Literal, NamedTuple

from msgspec import UNSET, Struct, UnsetType

from eventlm.server.timings import EventlmReply
from eventlm.text.choice_output import ApiFinishReason
from eventlm.text.generation import UsageCounts


class ReplyIdentity(NamedTuple):
    """What all chunks of a reply, and the reply that is not streamed, have in common. `created` in seconds."""

    reply_id: str
    created: int

    @classmethod
    def draw(cls, prefix: str) -> ReplyIdentity:
        """Of a new reply."""
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()))


class PromptTokensDetails(Struct, frozen=True):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """How many of the output's tokens were reasoning, shown or not; the marks around it are none of it."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of one reply. A prompt counts once, whatever `n` is. Details of the output: where it may reason."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, counts: UsageCounts) -> Usage:
        """The usage that a reply reports."""
        return cls(
            prompt_tokens=counts.prompt,
            completion_tokens=counts.completion,
            total_tokens=counts.prompt + counts.completion,
            prompt_tokens_details=PromptTokensDetails(counts.cached),
            completion_tokens_details=UNSET if counts.reasoning is None else CompletionTokensDetails(counts.reasoning),
        )


class TopLogprob(Struct, frozen=True):
    """A token that could have come, and the logarithm of its probability. `bytes` is the token's own, in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """A token that came, with the most likely ones at its place, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """`logprobs` of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """`logprobs` of a completion, one entry of each list a token.

    top_logprobs: of the token itself and of the most likely ones, by their text. text_offset: characters before it.
    The first token of an echoed prompt has neither, since nothing predicts it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """A token at a place of a prompt: `rank` 1 is the most likely one there."""

    logprob: float
    rank: int
    decoded_token: str


#: By place of the prompt, then by token id: the token that is there, and the most likely ones. vLLM's extension.
PromptLogprobs = list[dict[int, PromptLogprob] | None]
StopReason = str | int | None
#: vLLM's extension, for those who ask with `return_token_ids`.
TokenIds = list[int] | UnsetType


class FunctionCall(Struct, frozen=True):
    """What is called. `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call that the assistant asks for."""

    id: str
    type: str = "function"
    function: FunctionCall


class ChatReplyMessage(Struct, frozen=True):
    """What the assistant said. `content` is null where it only called tools.

    reasoning_content, reasoning: two names of the same (DeepSeek's and vLLM's, OpenRouter's).
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One of the `n` answers. `stop_reason` (vLLM's extension): the stop string or stop token that ended it."""

    index: int
    message: ChatReplyMessage
    finish_reason: ApiFinishReason
    logprobs: ChatLogprobs | None = None
    stop_reason: StopReason = None
    token_ids: TokenIds = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """Reply of `/v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    service_tier: str | UnsetType = UNSET
    eventlm: EventlmReply | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds = UNSET


class FunctionCallDelta(Struct, frozen=True):
    """What a chunk adds to a call. `name` comes first and whole."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds to the call at place `index`; its id comes with its name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A chunk's part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ApiFinishReason | None = None
    #: In the last chunk only.
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a chat stream. `usage` is absent unless the client asked for it, then null except in the last.

    `prompt_token_ids` are in the first one of each choice.
    """

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: None = None
    service_tier: str | UnsetType = UNSET
    eventlm: EventlmReply | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: TokenIds = UNSET


class CompletionChoice(Struct, frozen=True):
    """One completed text, or a chunk's part of it. The first one of a stream has the `prompt_token_ids`."""

    index: int
    text: str
    finish_reason: ApiFinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    #: Once it is over.
    stop_reason: StopReason | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """Reply of `/v1/completions`, and one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: None = None
    service_tier: str | UnsetType = UNSET
    eventlm: EventlmReply | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


class CancelledReply(Struct, frozen=True, kw_only=True):
    """A reply of which nothing is kept any more. cancelled: its owner has ended it; else it was over."""

    id: str
    object: str = "stream"
    cancelled: bool


class Model(Struct, frozen=True, kw_only=True):
    """One entry of `/v1/models`."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "eventlm"
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    """Reply of `/v1/models`."""

    object: str = "list"
    data: list[Model]


class Health(Struct, frozen=True):
    """Reply of `/health`: requests are taken; paused: and wait. A server that takes none answers 503."""

    status: Literal["ready", "paused"]


class Version(Struct, frozen=True):
    """Reply of `/version`."""

    version: str
