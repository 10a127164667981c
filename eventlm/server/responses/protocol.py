"""The bodies of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from eventlm.errors import InputError
from eventlm.text.decoding import convert_request, decode_object
from eventlm.text.protocol import WITHOUT_BEAM_SEARCH, GenerationRequest, NumLogprobs, ReasoningEffort

LOGPROBS = "message.output_text.logprobs"
#: What `include` may name. Reasoning is never encrypted here: its text is in the item.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Verbosity = Literal["low", "medium", "high"]
#: Identifiers that clients choose.
Identifier = Annotated[str, Meta(max_length=512)]

#: Fields that change nothing, and why.
IGNORED = {
    "max_tool_calls": "of tools that run at the server, of which there are none",
    "safety_identifier": "shown again",
    "user": "shown again",
}
#: Fields that are errors, each with its neutral values.
UNSUPPORTED_IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    **WITHOUT_BEAM_SEARCH,
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "messages": (),
    "response_format": (),
    "logprobs": (False,),
    "n": (1,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "echo": (False,),
}
#: What to do instead of some of them.
_REMEDIES = {
    "prompt": "prompt templates are kept at OpenAI; send their text as 'instructions' and 'input'",
    "context_management": "compact the conversation at the client, or set 'truncation' to \"auto\"",
    "moderation": "moderate at the client",
    "max_tokens": "here it is 'max_output_tokens'",
    "max_completion_tokens": "here it is 'max_output_tokens'",
    "messages": "here it is 'input'",
    "response_format": "here it is 'text.format'",
    "logprobs": f"here it is 'include': [\"{LOGPROBS}\"] with 'top_logprobs'",
    "n": "send several requests",
    "prompt_logprobs": "/v1/chat/completions has it",
    "return_token_ids": "/v1/chat/completions has it",
    "return_tokens_as_token_ids": "/v1/chat/completions has it",
    "echo": "/v1/completions has it",
}


class InputPart(Struct, omit_defaults=True, kw_only=True):
    """A part of a message, of a function's output or of reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None


class InputItem(Struct, omit_defaults=True, kw_only=True):
    """One item of a conversation. Without a `type` it is a message, or a reference if it has no role.

    call_id, name, arguments: of a function call; output: what the function returned. summary, content,
    encrypted_content: of reasoning.
    """

    type: str | None = None
    id: Identifier | None = None
    status: ItemStatus | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    phase: str | None = None
    call_id: Identifier | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class TextFormat(Struct, omit_defaults=True):
    """`text.format`. A schema is enforced with and without `strict`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextConfig(Struct):
    """`text`. `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningConfig(Struct):
    """`reasoning`. `effort` is for templates that read it; summaries are empty, since the reasoning itself is shown."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | UnsetType | None = UNSET


class ConversationRef(Struct):
    """A conversation by its id."""

    id: str


class InputFields(GenerationRequest, kw_only=True):
    """What makes a prompt, and how it is continued."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    #: As chats have it, for those that say that they want none.
    logprobs: bool | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation, in either form."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


class ResponsesRequest(InputFields, kw_only=True):
    """Body of `POST /v1/responses`.

    max_tool_calls: of tools that run at the server, of which there are none. safety_identifier: only shown again, as
    prompt_cache_key is.
    """

    include: list[str] | None = None
    top_logprobs: NumLogprobs | None = None
    max_tool_calls: Annotated[int, Meta(ge=0)] | None = None
    background: bool | None = None
    store: bool | None = None
    prompt_cache_key: Identifier | None = None
    safety_identifier: Identifier | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return LOGPROBS in (self.include or ())


class InputTokensRequest(InputFields, kw_only=True):
    """Body of `POST /v1/responses/input_tokens`."""


BodyT = TypeVar("BodyT", bound=InputFields)


def decode_body(data: bytes, type_: type[BodyT]) -> BodyT:
    """The body in a request's bytes. Raises InputError."""
    raw = decode_object(data)
    for name, remedy in _REMEDIES.items():
        value = raw.get(name)
        if value is not None and value not in UNSUPPORTED_IN_RESPONSES[name]:
            raise InputError(name, f"'{name}' is not a parameter of /v1/responses: {remedy}.")
    body = convert_request(raw, type_, UNSUPPORTED_IN_RESPONSES)
    for index, name in enumerate(body.include or () if isinstance(body, ResponsesRequest) else ()):
        if name not in INCLUDABLE:
            param, known = f"include[{index}]", ", ".join(map(repr, INCLUDABLE))
            raise InputError(param, f"Invalid value for '{param}': this server can include {known}.")
    return body
