"""The bodies of requests. `decoding.py` decodes them.

Unknown fields are ignored, except in this server's own objects and in `structured_outputs`. Fields that would change
the output but are not supported are errors unless they have a neutral value (see `UNSUPPORTED`): no parameter is
silently dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from eventlm.sampling_params import LogitBias, SamplingParams, StructuredOutputsParams, TokenId
from eventlm.text.decoding import MAX_LOGIT_BIASES, TOKEN_ID_PATTERN

#: OpenAI's roles.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: Those and others, which a template may know.
ROLE_PATTERN = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}\Z"
MAX_N = 128
#: Most alternatives of a token with log-probabilities.
MAX_LOGPROBS = 20
#: Most tokens with log-probabilities of their own.
MAX_LOGPROB_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
#: Most characters of a request's own chat template.
MAX_TEMPLATE_CHARACTERS = 64 * 1024
#: Sequences that one body can ask for: prompts times n.
MAX_GROUP_SEQUENCES = 2048

#: 11.5 days.
Milliseconds = Annotated[int, Meta(ge=1, le=1_000_000_000)]


def _described(**schema: Any) -> Meta:
    """Limits that other code checks, for /openapi.json."""
    return Meta(extra_json_schema=schema)


#: Ids that clients may choose. They appear in logs, headers and paths.
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:/+=@-]{1,128}$"
#: vLLM's: the request's id, if the header `x-request-id` has none.
RequestId = Annotated[str, _described(pattern=REQUEST_ID_PATTERN)]
Role = Annotated[
    str,
    Meta(
        description="OpenAI's roles, and any other that the model's chat template writes.",
        extra_json_schema={"pattern": r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"},
    ),
]
StopString = Annotated[str, Meta(min_length=1, max_length=4096)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
TokenIdKey = Annotated[str, Meta(pattern=TOKEN_ID_PATTERN)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
#: A beam's score is divided by its length to this power.
LengthPenalty = Annotated[float, Meta(ge=-10, le=10)]
SMALLEST_SEED, LARGEST_SEED = -(2**63), 2**63 - 1
Seed = Annotated[int, _described(minimum=SMALLEST_SEED, maximum=LARGEST_SEED)]
Text = Annotated[str, _described(minLength=1)]
#: A text, token ids, or a list of either.
Prompts = Text | Annotated[list[Text | TokenId | list[TokenId]], _described(minItems=1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Struct):
    """`stream_options`. `continuous_usage_stats` (vLLM's) puts usage so far into every chunk of a choice."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class LatencyObjective(Struct, forbid_unknown_fields=True):
    """`slo`: objectives for the times to the first token and between tokens."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None


class JsonSchemaFormat(Struct):
    """`response_format.json_schema`. The schema is enforced with and without `strict`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`. `schema` beside the type json_object is llama.cpp's."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None


class EventlmOptions(Struct, forbid_unknown_fields=True):
    """`eventlm`: options of this server. `timings`: report in the reply where the time went."""

    timings: bool | None = None


class RequestFields(Struct, kw_only=True):
    """The fields that the bodies of all generating endpoints have: the model, an id, and how the request is scheduled.

    model: empty for the one that is served. `eventlm.server.scheduling` has the other defaults.
    """

    model: str = ""
    request_id: RequestId | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    deadline_ms: Milliseconds | None = None
    drop_if_late: bool | None = None
    slo: LatencyObjective | None = None
    #: OpenAI's: a service class, or one of its own tiers.
    service_tier: str | None = None
    #: Requests of one session go to the same replica under some routers. The second is OpenAI's name.
    session_id: str | int | None = None
    prompt_cache_key: str | None = None
    eventlm: EventlmOptions | None = None

    @property
    def wants_timings(self) -> bool:
        """Whether the reply has timings."""
        return self.eventlm is not None and bool(self.eventlm.timings)

    @property
    def used_tier(self) -> str | UnsetType:
        """`service_tier` of the reply, once the request is scheduled."""
        return UNSET if self.service_tier is None else self.service_tier


#: Fields of `SamplingParams` that bodies do not have: an alias, and derived fields.
_NOT_IN_BODIES = {"guided_decoding", "eos_token_ids", "bad_words_token_ids", "grammar", "pooling"}
SAMPLING_FIELDS = tuple(field for field in structs.fields(SamplingParams) if field.name not in _NOT_IN_BODIES)

if TYPE_CHECKING:
    _SamplingFields = RequestFields
else:
    #: Those fields with their limits. In a body each may be null, which is the same as absent.
    _SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [(field.name, field.type | None, None) for field in SAMPLING_FIELDS],
        bases=(RequestFields,),
        kw_only=True,
    )


class GenerationRequest(_SamplingFields, kw_only=True):
    """The fields of both endpoints. Absent and null mean the default.

    The fields of `SamplingParams` are inherited. Those repeated here have another form or narrower limits than in
    Python, or a description.
    """

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    logit_bias: Annotated[dict[TokenIdKey, LogitBias], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    allowed_token_ids: (
        Annotated[
            list[TokenId],
            Meta(
                min_length=1,
                description="The only tokens that may come. Beside a grammar: of those that it allows, unless none of "
                "these is among them.",
            ),
        ]
        | None
    ) = None
    bad_words: (
        Annotated[
            list[BadWord],
            Meta(
                max_length=MAX_BAD_WORDS,
                description="Words that must not come. Beside a grammar: unless it leaves nothing else.",
            ),
        ]
        | None
    ) = None
    min_tokens: (
        Annotated[
            int,
            Meta(ge=0, description="How many tokens come before an end. Beside a grammar: unless it asks for the end."),
        ]
        | None
    ) = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    #: How many of the prompt's tokens are kept; -1: as many as fit into the context.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    #: Where tokens are cut off: `left` keeps the last ones, `right` the first.
    truncation_side: Literal["left", "right"] | None = None
    logprob_token_ids: (
        Annotated[
            list[TokenId],
            Meta(
                min_length=1,
                max_length=MAX_LOGPROB_TOKEN_IDS,
                description="Tokens whose log-probabilities are reported at each position of the output beside the "
                "output's own token, in place of the most likely ones.",
            ),
        ]
        | None
    ) = None
    #: Texts have no such spaces, whatever this says.
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    #: Names that `structured_outputs` had in older versions of vLLM.
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    #: In log-probabilities: `token_id:` and the id in place of a token's text.
    return_tokens_as_token_ids: bool | None = None
    #: Of these two only the form is checked; they are neither logged nor recorded. The bounds are OpenAI's.
    user: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives of each token to report; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for prompt tokens."""
        return self.prompt_logprobs

    @property
    def most_tokens(self) -> int | None:
        """Most output tokens; None: as many as the context holds."""
        return self.max_tokens

    @property
    def generates(self) -> bool:
        """Whether there is any output."""
        return True


class ContentPart(Struct):
    """One part of a message's content: a text, or an assistant's refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Struct):
    """The function that an assistant called; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class MessageToolCall(Struct):
    """A call in an assistant's message."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(Struct):
    """One message of a conversation. `reasoning_content` and `reasoning` are two names of the same."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: dict[str, Any] | None = None


class SearchableRequest(GenerationRequest, kw_only=True):
    """The fields of bodies that may ask for a beam search."""

    use_beam_search: bool | None = None
    #: How many beams; as many as `n` if it is absent.
    beam_width: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    length_penalty: LengthPenalty | None = None


class ChatCompletionRequest(SearchableRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], _described(minItems=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    #: In place of the model's, if the server allows that.
    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE_CHARACTERS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    #: Whether the reply begins with the last message, if that has the reply's role.
    echo: bool | None = None
    documents: list[dict[str, Any]] | None = None
    #: For templates that read it.
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: (
        Annotated[
            int,
            Meta(
                ge=-1,
                description="After so many tokens of reasoning its end mark follows. -1: no budget.",
            ),
        ]
        | None
    ) = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    #: Whether reasoning is in the reply, and whether it is separated from the content.
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reply_role(self) -> str:
        """The role of the reply's message: that of the last one if it goes on."""
        is_new = self.add_generation_prompt is not False and not self.continue_final_message
        return "assistant" if is_new else self.messages[-1].role

    @property
    def reasoning_budget(self) -> int | None:
        """How many tokens the reasoning may have; None: any number."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget


class CompletionRequest(SearchableRequest, kw_only=True):
    """Body of `POST /v1/completions`. `prompt` is a text, token ids, or a list of either."""

    prompt: Prompts
    #: 0 is for `echo` only: the prompt is shown, and scored if log-probabilities are asked for.
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    @property
    def generates(self) -> bool:
        return self.max_tokens != 0


#: Fields of a chat on which its prompt depends, beside its messages.
USED_BY_TEMPLATES = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents",
    "reasoning_effort", "tools", "tool_choice",
)  # fmt: skip
#: Fields that are accepted and change nothing, with the reason.
IGNORED = {
    "spaces_between_special_tokens": "no text has such spaces",
    "store": "these replies are not kept",
    "prediction": "a hint that makes OpenAI's models faster and never changes the text",
    "mm_processor_kwargs": "about images, and models here take text only",
    "user": "neither recorded nor logged",
    "metadata": "neither recorded nor logged",
    "safety_identifier": "neither recorded nor logged",
    "stream_interval": "chunks are joined for clients that read slowly, and for no others",
}
#: Unsupported fields, each with its neutral values.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "grammar": ("",),
    "json_schema": (),
    "logits_processors": ([],),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "repetition_detection": (),
    "watermarking": (False,),
    "vllm_xargs": ({},),
}
#: The same for APIs without beam search.
WITHOUT_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "use_beam_search": (False,),
    "beam_width": (),
    "length_penalty": (1,),
}
UNSUPPORTED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "return_prompt_text": (False,),
}
UNSUPPORTED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "prompt_embeds": (),
}
