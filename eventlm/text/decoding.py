"""Decodes requests. Errors name the field at fault."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, inspect

from eventlm.config.options import did_you_mean
from eventlm.errors import InputError, InvalidJsonError, InvalidTypeError, UnknownParameterError
from eventlm.field_errors import field_error, out_of_bounds, split_message
from eventlm.sampling_params import LARGEST_LOGIT_BIAS

#: Reasons for fields that will not be supported.
_REASONS = {
    "best_of": "is not a field of chats, in which a beam search has its number of beams in 'beam_width'",
    "grammar": "is not a field of this API: put the grammar into 'structured_outputs', as its 'grammar'",
    "json_schema": "is not a field of this API: put the schema into 'response_format' or 'structured_outputs'",
    "images": "is not supported: models here take text only",
    "kv_transfer_params": "is not supported: this server keeps every prompt's keys and values in its own workers",
    "thread": "is not supported: send the whole conversation in 'messages'",
    "mcp_servers": "is not supported: connect to MCP servers at the client, and give their tools in 'tools'",
}

#: JSON has no other keys than strings.
TOKEN_ID_PATTERN = r"^(0|[1-9][0-9]{0,9})$(?!\n)"
#: As long as Anthropic's are. OpenAI's have up to 64 characters.
FUNCTION_NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,128}\Z"
#: What a text of a pattern must be, by the pattern as msgspec prints it.
_FORMATS = {
    repr(TOKEN_ID_PATTERN): 'each key must be a token id, such as "50256"',
    repr(FUNCTION_NAME_PATTERN): "it must have 1 to 128 letters, digits, underscores or dashes",
}

#: Most pairs of `logit_bias`.
MAX_LOGIT_BIASES = 1024
#: Keys that a message names, and how much of each.
_MAX_NAMED_KEYS, _MAX_KEY_CHARACTERS = 5, 64

RequestT = TypeVar("RequestT", bound=Struct)

#: Names and indexes of a path.
_STEPS = re.compile(r"[^.\[\]]+")
_WRONG_FORMAT = re.compile(r"Expected `str` matching regex (.*)", re.DOTALL)
_UNKNOWN_TAG = re.compile(r"Invalid value (.*)", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


def decode_request(body: bytes, type_: type[RequestT], unsupported: dict[str, tuple[Any, ...]]) -> RequestT:
    """The request in `body`. Raises InputError that names the field at fault."""
    return convert_request(decode_object(body), type_, unsupported)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InputError."""
    with _collector_paused():
        raw = _decode_json(body)
    if not isinstance(raw, dict):
        raise InvalidTypeError(None, "The request body must be a JSON object.")
    return raw


def convert_request(raw: dict[str, Any], type_: type[RequestT], unsupported: dict[str, tuple[Any, ...]]) -> RequestT:
    """The request that a decoded body is. Raises InputError that names the field at fault."""
    if raw.get("model", "") is None:
        # Clients of llama.cpp send it; it means the same as none.
        del raw["model"]
    try:
        with _collector_paused():
            request = _convert(raw, type_)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), type_=type_, value=raw) from error
    except RecursionError as error:
        raise InvalidJsonError("it is nested too deeply") from error
    for name, neutral in unsupported.items():
        value = raw.get(name)
        if value is not None and value not in neutral:
            remedy = (
                f"leave it out or set it to {msgspec.json.encode(neutral[0]).decode()}" if neutral else "leave it out"
            )
            raise InputError(name, f"'{name}' {_REASONS.get(name, 'is not supported yet')}; {remedy}.")
    return request


@contextmanager
def _collector_paused() -> Iterator[None]:
    """JSON has no cycles, and looking for them would take most of the time of decoding a large body.

    Decoding is one call that holds the interpreter lock, so the pause affects nothing else.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _convert(raw: dict[str, Any], type_: type[RequestT]) -> RequestT:
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    return msgspec.convert({name: _with_integers(value, name) for name, value in raw.items()}, type_)


def _with_integers(value: Any, name: str) -> Any:
    """A field's value with whole numbers as integers: JSON has one kind of number, and some clients write `2.0`.

    A field of floats takes integers too. Free objects, such as tools, stay as they are.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(each, name) for each in value]
    if isinstance(value, dict) and name in ("slo", "options"):
        return {key: _with_integers(each, name) for key, each in value.items()}
    return value


def _decode_json(body: bytes) -> Any:
    if not body.strip():
        raise InvalidJsonError("it is empty")
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidJsonError("it is not UTF-8") from error
    except RecursionError as error:
        raise InvalidJsonError("it is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise InvalidJsonError(str(error).partition(" - at ")[0]) from error


def validation_error(text: str, root: str = "", type_: Any = None, value: Any = None) -> InputError:
    """The error for a message of msgspec such as "Expected `int`, got `str` - at `$.messages[0].role`".

    `root`: the path of the converted value in the body. `type_`: its type, to list the values of enumerated fields.
    `value`: what was converted, to quote the number that is out of its bounds.
    """
    problem, subpath = split_message(text)
    path = (f"{root}.{subpath}" if root and not subpath.startswith("[") else root + subpath).strip(".")
    found = _value_at(value, subpath)
    if subpath == "logit_bias" and isinstance(found, dict):
        return _logit_bias_error(found)
    if unknown := _UNKNOWN_FIELD.match(problem):
        return _unknown_parameter(path, unknown[1], _fields_at(type_, subpath))
    if problem.startswith("Invalid enum value") and (words := _words_at(type_, subpath)):
        problem = f"supported values are {', '.join(map(repr, words))}"
    if (tag := _UNKNOWN_TAG.fullmatch(problem)) and (tags := _tags_at(type_, subpath)):
        problem = f"supported values are {', '.join(map(repr, tags))}, got {tag[1]}"
    if wrong := _WRONG_FORMAT.fullmatch(problem):
        problem = _FORMATS[wrong[1]]
    return field_error(problem, path, found)


def _logit_bias_error(biases: dict[str, Any]) -> InputError:
    """The error for the keys and biases of an object that is not a `logit_bias`, which are named as they came."""
    if wrong := [key for key in biases if not re.match(TOKEN_ID_PATTERN, key)]:
        named = ", ".join(repr(key[:_MAX_KEY_CHARACTERS]) for key in wrong[:_MAX_NAMED_KEYS])
        more = f" and {len(wrong) - _MAX_NAMED_KEYS} more" if len(wrong) > _MAX_NAMED_KEYS else ""
        return InputError(
            "logit_bias",
            f"Invalid value for 'logit_bias': {_FORMATS[repr(TOKEN_ID_PATTERN)]}; these are not: {named}{more}.",
        )
    for key, bias in biases.items():
        param = f"logit_bias.{key}"
        if type(bias) not in (int, float):
            return InvalidTypeError(param, f"Invalid type for '{param}': the bias of a token must be a number.")
        if bias < -LARGEST_LOGIT_BIAS:
            return out_of_bounds(param, ">=", -LARGEST_LOGIT_BIAS, bias)
        if bias > LARGEST_LOGIT_BIAS:
            return out_of_bounds(param, "<=", LARGEST_LOGIT_BIAS, bias)
    return too_many_biases()


def too_many_biases() -> InputError:
    """The error for more than `MAX_LOGIT_BIASES`."""
    return InputError("logit_bias", f"Invalid value for 'logit_bias': at most {MAX_LOGIT_BIASES} pairs are allowed.")


def _value_at(value: Any, subpath: str) -> Any:
    """What a decoded value has at a path such as `slo.ttft_ms`; None if that is not the path of anything."""
    for step in _STEPS.findall(subpath):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def _unknown_parameter(path: str, name: str, known: list[str]) -> InputError:
    param = f"{path}.{name}"
    hint = did_you_mean(name, known, listed_as="known")
    return UnknownParameterError(param, f"Unknown parameter: '{param}'{hint}.")


def _fields_at(type_: Any, subpath: str) -> list[str]:
    """Names of the fields of the struct at a path such as `slo`; of `type_` itself if it is empty."""
    structs = (each for each in _types_at(type_, subpath) if isinstance(each, inspect.StructType))
    return [field.encode_name for each in structs for field in each.fields]


def _words_at(type_: Any, subpath: str) -> list[str | int]:
    """The values of an enumerated field at a path such as `tools[0].type`."""
    literals = (each for each in _types_at(type_, subpath) if isinstance(each, inspect.LiteralType))
    return [word for each in literals for word in each.values if word is not None]


def _tags_at(type_: Any, subpath: str) -> list[str]:
    """The values of a field such as `messages[0].content[0].type` that tells the structs of a union apart."""
    parent, _, name = subpath.rpartition(".")
    structs = (each for each in _types_at(type_, parent) if isinstance(each, inspect.StructType))
    return [each.tag for each in structs if each.tag_field == name and isinstance(each.tag, str)]


def _types_at(type_: Any, subpath: str) -> list[inspect.Type]:
    """What may be at a path, with unions taken apart."""
    found = [] if type_ is None else _alternatives(inspect.type_info(type_))
    for name in _STEPS.findall(subpath):
        found = [inner for each in found for inner in _inside(each, name)]
    return found


def _inside(type_: inspect.Type, name: str) -> list[inspect.Type]:
    """What may be in a field, or at an index."""
    match type_:
        case inspect.StructType():
            fields = [field for field in type_.fields if field.encode_name == name]
            return [each for field in fields for each in _alternatives(field.type)]
        case inspect.ListType():
            return _alternatives(type_.item_type)
    return []


def _alternatives(type_: inspect.Type) -> list[inspect.Type]:
    if isinstance(type_, inspect.Metadata):
        return _alternatives(type_.type)
    if isinstance(type_, inspect.UnionType):
        return [each for member in type_.types for each in _alternatives(member)]
    return [type_]
