"""The bodies of Anthropic's requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from eventlm.sampling_params import MinP, RepetitionPenalty, Temperature, TopP
from eventlm.text.protocol import RequestFields, Seed, StopString

#: Most messages of a conversation, as many as Anthropic's servers take.
MAX_MESSAGES = 100_000


class TextBlock(Struct, tag="text"):
    """A text."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """Reasoning of the assistant. `signature` says nothing here; clients send it back as it came."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag="redacted_thinking"):
    """Reasoning that only Anthropic's models can read. It is left out of the prompt."""

    data: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    """A call by the assistant."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag="tool_result"):
    """What a call returned."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct):
    """One message of a conversation. Those of the role `system` have texts only."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class InputTool(Struct):
    """A tool. Any other type than `custom` is refused, because only Anthropic's models or servers know such tools."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class ToolChoice(Struct):
    """`tool_choice`. `name` is the tool's, for the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    """`thinking`: whether the model reasons, if its chat template leaves a choice, and whether the reply shows it."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the model is to reason. `between_tools` is about notes between calls, without reasoning."""
        return self.type in ("enabled", "adaptive")


class OutputFormat(Struct):
    """`output_config.format`: the text of the reply is JSON that follows the schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """`output_config`. `effort` is for chat templates that read it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(RequestFields, kw_only=True):
    """Body of `POST /v1/messages`. Fewer than `max_tokens` come if the context holds no more."""

    model: str
    messages: Annotated[list[InputMessage], Meta(max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Meta(ge=1)]
    system: str | list[TextBlock] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    #: These five are vLLM's and work as in a chat.
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    #: An older name of `output_config.format`.
    output_format: OutputFormat | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the text of the reasoning is in the reply, if there is any."""
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def reply_schema(self) -> dict[str, Any] | None:
        """The schema that the reply's text follows; None if it may be anything."""
        format = self.output_config.format if self.output_config is not None else None
        format = format or self.output_format
        return None if format is None else format.schema


class CountTokensRequest(MessagesRequest, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None  # type: ignore[assignment]


#: Fields that are accepted and change nothing, with the reason.
IGNORED_IN_MESSAGES = {
    "metadata": "neither recorded nor logged",
    "cache_control": "prefixes are shared without it",
    "context_management": "the chat template leaves old reasoning out",
    "inference_geo": "there is one place",
    "speed": "there is one speed",
    "diagnostics": "about Anthropic's caches",
    "fallbacks": "about Anthropic's models",
}
#: Fields that are an error unless they have one of these values.
UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "thread": (),
    "container": (),
    "mcp_servers": ([],),
    "compaction": (),
}
