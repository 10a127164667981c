"""Bodies whose model other servers run. What those understand is passed on as it came, known here or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Struct, structs

from eventlm.engine.backend import ForwardedRequest
from eventlm.errors import InputError, InvalidJsonError
from eventlm.text.decoding import convert_request, decode_object
from eventlm.text.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, RequestFields

BodyT = TypeVar("BodyT", bound=RequestFields)

#: Of fields that all bodies have, the one that backends know too.
_CACHE_KEY = "prompt_cache_key"
#: Fields that are this server's own.
OWN_FIELDS = frozenset(
    {
        *(field.name for field in structs.fields(RequestFields) if field.name != _CACHE_KEY),
        "n", "seed", "stream", "stream_options", "user", "metadata", "safety_identifier",
    }
)  # fmt: skip
#: Fields that are passed on, and that this server needs too.
_SHARED_FIELDS = frozenset(
    {
        "messages", "prompt", "max_tokens", "max_completion_tokens", "cache_salt", "add_special_tokens",
        "include_reasoning", "return_token_ids",
    }
)  # fmt: skip
#: What replies cannot have here, what no two kinds of servers do alike, and what lets a client move data between the
#: servers behind this one; with neutral values.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
}


class ForwardedChatRequest(ChatCompletionRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`. passed: what is forwarded of it; null is the same as absent. Other fields
    have only what this server needs.
    """

    messages: list[dict[str, Any]]  # type: ignore[assignment]
    passed: dict[str, Any] = {}

    @property
    def reply_role(self) -> str:
        return "assistant"


class ForwardedCompletionRequest(CompletionRequest, kw_only=True):
    """Body of `POST /v1/completions`, likewise."""

    passed: dict[str, Any] = {}


def decode_forwarded(data: bytes, type_: type[BodyT], shared: frozenset[str] = _SHARED_FIELDS) -> BodyT:
    """The body in a request's bytes, of a type that has `passed`. shared: the fields that are passed on, and that this
    server needs too. Raises InputError.
    """
    raw = decode_object(data)
    _check_forwarded(raw)
    read = OWN_FIELDS | shared | {_CACHE_KEY}
    body = convert_request({name: value for name, value in raw.items() if name in read}, type_, {})
    passed = {name: value for name, value in raw.items() if value is not None and name not in OWN_FIELDS}
    return structs.replace(body, passed=passed)


def _check_forwarded(fields: Mapping[str, Any]) -> None:
    """Raise InputError for what no backend is asked for."""
    for name, neutral in _REFUSED.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise InputError(name, f"'{name}' is not available for a model that other servers run; leave it out.")


def forwarded_fields(body: GenerationRequest) -> dict[str, Any]:
    """What is forwarded of a body, as it came or as another API's was translated. Raises InputError."""
    if isinstance(body, ForwardedChatRequest | ForwardedCompletionRequest):
        return body.passed
    fields = {name: value for name, value in _plain(body).items() if value != [] and name not in OWN_FIELDS}
    _check_forwarded(fields)
    if (schema := fields.pop("guided_json", None)) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if (grammar := fields.pop("guided_grammar", None)) is not None:
        fields["structured_outputs"] = {"grammar": grammar}
    if (schema_format := fields.get("response_format", {}).get("json_schema")) is not None:
        # OpenAI's API wants one.
        schema_format.setdefault("name", "reply")
    return fields


def _plain(value: Any) -> Any:
    """Structs as objects without what is absent. Objects of the client's own stay as they are."""
    if isinstance(value, Struct):
        found = structs.asdict(value).items()
        return {name: _plain(each) for name, each in found if each is not None and each is not UNSET}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def encode_fields(fields: Mapping[str, Any]) -> bytes:
    """The JSON of what is forwarded. Raises InputError."""
    try:
        return msgspec.json.encode(fields)
    except RecursionError as error:
        raise InvalidJsonError("it is nested too deeply") from error


def with_max_tokens(request: ForwardedRequest, max_tokens: int) -> ForwardedRequest:
    """The same with another limit of its output."""
    fields = msgspec.json.decode(request.body)
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    return structs.replace(request, body=msgspec.json.encode(fields | {name: max_tokens}))
