"""What Ollama's requests have in common: the model's name, `options`, `think` and `format`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from eventlm.errors import InputError, UnknownModelError
from eventlm.sampling_params import MinP, Penalty
from eventlm.server.context import ServerContext
from eventlm.server.translation import (
    SMALLEST_TOP_P,
    StopText,
    bounded_repetition_penalty,
    bounded_temperature,
    stop_strings,
)
from eventlm.text.protocol import JsonSchemaFormat, NumLogprobs, RequestFields, ResponseFormat, Seed

#: What a name without a tag stands for.
LATEST = ":latest"

#: Variables of chat templates that turn thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
#: A duration of 0, as a number or as Go writes it.
_ZERO = r"[-+]?0+(\.0*)?(ns|us|µs|ms|s|m|h)?"
#: Fields that change nothing, each with the reason.
IGNORED_BY_OLLAMA = {
    "keep_alive": "the model stays loaded",
    "truncate": "a prompt that does not fit the context is an error",
    "shift": "a text ends with the context",
    "options.num_ctx": "the context is that of `--max-model-len`",
    "options.num_keep": "nothing is shifted out of the context",
    "options.typical_p": "there is no such sampler; nor are there `tfs_z`, `mirostat` and `penalize_newline`",
    "options.num_batch": "the server decides it, as all of `num_gpu`, `main_gpu`, `num_thread`, `use_mmap` and so on",
}


class OllamaOptions(Struct, kw_only=True):
    """`options`. Those that are not here are ignored.

    What Ollama has no bounds for is cut to those of this server, or has its neutral value.

    num_predict: most tokens, 0 and below: as many as the context holds. repeat_last_n: 0 turns the three penalties off;
    otherwise they see the whole text.
    """

    num_predict: int | None = None
    temperature: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    @property
    def most_tokens(self) -> int | None:
        """Most output tokens; None: as many as the context holds."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    def fields(self) -> dict[str, Any]:
        """The fields of a request to the model, except for the number of tokens."""
        penalties = {
            "repetition_penalty": bounded_repetition_penalty(self.repeat_penalty),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        if self.repeat_last_n == 0:
            penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {
            "temperature": bounded_temperature(self.temperature),
            "top_k": self.top_k,
            "top_p": None if self.top_p is None else max(self.top_p, SMALLEST_TOP_P),
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": stop_strings(self.stop),
            **penalties,
        }


class OllamaFields(RequestFields, kw_only=True):
    """The fields of `/api/chat` and `/api/generate`.

    stream: true unless it says otherwise. format: `json`, or a JSON schema. keep_alive: has no effect; without a prompt
    the reply says that the model was loaded, or with 0 that it was unloaded.
    """

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def load_reason(self) -> str:
        """`done_reason` of a reply without generation."""
        return "unload" if re.fullmatch(_ZERO, str(self.keep_alive)) else "load"

    @property
    def used_options(self) -> OllamaOptions:
        """`options`, or none of them."""
        return self.options or OllamaOptions()


def served_name(context: ServerContext, name: str) -> str:
    """The name of a model as requests here use it. Raises UnknownModelError."""
    served = context.engine.model_names
    for known in (name, name.removesuffix(LATEST)):
        if known in served:
            return known
    raise UnknownModelError(name)


def response_format(format: str | dict[str, Any] | None) -> ResponseFormat | None:
    """What the text must match. Raises InputError."""
    if format is None or format == "":
        return None
    if isinstance(format, dict):
        return ResponseFormat("json_schema", json_schema=JsonSchemaFormat(schema=format))
    if format != "json":
        raise InputError("format", "Invalid value for 'format': it is 'json' or a JSON schema, as an object.")
    return ResponseFormat("json_object")


def thinking_fields(context: ServerContext, body: OllamaFields) -> dict[str, Any]:
    """The fields of a chat that `think` stands for. Raises InputError if this model cannot think."""
    if body.think is None:
        return {}
    fields: dict[str, Any]
    if context.forwards:
        fields = {"chat_template_kwargs": {name: bool(body.think) for name in _SWITCHES}}
        fields["include_reasoning"] = bool(body.think)
        if isinstance(body.think, str):
            fields["reasoning_effort"] = body.think
        return fields
    template, knows_reasoning = context.tokenizer.chat_template, context.formats.reasoning is not None
    source = template.source if template is not None else ""
    if body.think and not knows_reasoning:
        raise InputError("think", f"'think' is not supported: the model '{body.model}' does not think; leave it out.")
    switches = {name: bool(body.think) for name in _SWITCHES if name in source}
    fields = {"chat_template_kwargs": switches, "include_reasoning": bool(body.think)}
    if isinstance(body.think, str) and "reasoning_effort" in source:
        fields["reasoning_effort"] = "high" if body.think == "max" else body.think
    return fields


#: Names of fields in errors, where Ollama has others.
NATIVE_NAMES = {
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "seed": "options.seed",
}
