"""Replies in OpenAI's format. Fields that are `UNSET` are left out, those that are None are null."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from eventlm.server.model_card import ModelCard
from eventlm.server.timings import EventlmReply
from eventlm.text.choice_output import ApiFinishReason
from eventlm.text.generation import UsageCounts


class PromptTokensDetails(Struct, frozen=True):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """How many of the output's tokens were reasoning, shown or not, without the marks around it."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of one reply. A prompt counts once, whatever `n` is."""

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
    """An alternative token and its log-probability. `bytes` are the token's own, in UTF-8; null if they are unknown."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Struct, frozen=True):
    """A token of the output, with the most likely ones at its position, best first."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(Struct, frozen=True):
    """`logprobs` of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """`logprobs` of a completion, one entry of each list a token.

    top_logprobs: of the token itself and of the most likely ones, by their text. text_offset: characters before it. The
    first token of an echoed prompt has no log-probabilities.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """A token at a position of a prompt; the most likely one has `rank` 1."""

    logprob: float
    rank: int
    decoded_token: str


#: By position, then by token id: the prompt's token and the most likely ones. vLLM's extension.
PromptLogprobs = list[dict[int, PromptLogprob] | None]
StopReason = str | int | None
#: vLLM's extension, with `return_token_ids`. As there, a whole reply has a null without it, and a chunk nothing.
TokenIds = list[int] | UnsetType | None


def null_if_unset(token_ids: TokenIds) -> list[int] | None:
    """What a whole reply has where a chunk has nothing."""
    return None if isinstance(token_ids, UnsetType) else token_ids


class FunctionCall(Struct, frozen=True):
    """A called function. `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call by the assistant."""

    id: str
    type: str = "function"
    function: FunctionCall


class ChatReplyMessage(Struct, frozen=True):
    """The reply's message. `content` is null if it only called tools. `role`: that of the message that it continues.

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
    token_ids: TokenIds = None


class _Reply(Struct, frozen=True, kw_only=True):
    """The fields that all replies and chunks have."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: None = None
    service_tier: str | UnsetType = UNSET
    eventlm: EventlmReply | UnsetType = UNSET


class ChatCompletion(_Reply, frozen=True, kw_only=True):
    """Reply of `/v1/chat/completions`."""

    object: str = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: TokenIds = None


class FunctionCallDelta(Struct, frozen=True):
    """A chunk's part of a call. The first has the `name`."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A chunk's part of call number `index`. The first has its id and name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """A chunk's part of a message."""

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


class ChatCompletionChunk(_Reply, frozen=True, kw_only=True):
    """One event of a chat stream. `usage` is absent unless the client asked for it, then null except in the last.

    `prompt_token_ids` are in the first chunk of each choice.
    """

    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
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
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class Completion(_Reply, frozen=True, kw_only=True):
    """Reply of `/v1/completions`, and one event of its stream."""

    object: str = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelMeta(Struct, frozen=True, kw_only=True):
    """A model in figures, with llama.cpp's names; 0: unknown. n_ctx_train: the longest context it was made for."""

    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class Model(Struct, frozen=True, kw_only=True):
    """One entry of `/v1/models`. `root`: the first name of the same model, as vLLM has it. `meta` is llama.cpp's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "eventlm"
    root: str
    max_model_len: int
    meta: ModelMeta


class ModelList(Struct, frozen=True, kw_only=True):
    """Reply of `/v1/models`. `models` are the same, as newer versions of llama.cpp have them too."""

    object: str = "list"
    data: list[Model]
    models: list[ModelCard]
