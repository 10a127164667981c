"""From a request's bytes to its struct, and from what does not fit to the error that names the field."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, inspect

from eventlm.config.options import did_you_mean
from eventlm.errors import InputError, InvalidJsonError, InvalidTypeError, UnknownParameterError
from eventlm.field_errors import field_error, split_message
from eventlm.text.whole_numbers import with_integers

#: Why some of them are not.
_REASONS = {
    "chat_template": "is not accepted: a template is a program, and this server runs only the one in the model's folder"
}

RequestT = TypeVar("RequestT", bound=Struct)

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
    try:
        with _collector_paused():
            request = _convert(raw, type_)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), type_=type_) from error
    except RecursionError as error:
        raise InvalidJsonError("it is nested too deeply") from error
    for name, neutral in unsupported.items():
        value = raw.get(name)
        if value is not None and value not in neutral:
            remedy = f"leave it out or set it to {_to_json(neutral[0])}" if neutral else "leave it out"
            raise InputError(name, f"'{name}' {_REASONS.get(name, 'is not supported yet')}; {remedy}.")
    return request


@contextmanager
def _collector_paused() -> Iterator[None]:
    """JSON has no cycles, and to look for them while millions of its values are made takes most of the time.

    All the process waits meanwhile: to decode is one call without an end in between, in a thread as well.
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
    return msgspec.convert(with_integers(raw, type_), type_)


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


def validation_error(text: str, root: str = "", type_: type[Struct] | None = None) -> InputError:
    """The error for a message of msgspec such as "Expected `int`, got `str` - at `$.messages[0].role`".

    `root`: where in the body the value is that was converted. `type_`: to what, for the words that a field can have.
    """
    problem, place = split_message(text)
    path = (f"{root}.{place}" if root and not place.startswith("[") else root + place).strip(".")
    if unknown := _UNKNOWN_FIELD.match(problem):
        return _unknown_parameter(path, unknown[1], _fields_at(type_, place))
    if problem.startswith("Invalid enum value") and (words := _words(type_).get(place)):
        problem = f"supported values are {', '.join(map(repr, words))}"
    return field_error(problem, path)


@functools.cache
def _words(type_: type[Struct] | None) -> dict[str, list[str]]:
    """For each field of a request that is one of several words, those words."""
    found: dict[str, list[str]] = {}
    fields = inspect.type_info(type_).fields if type_ is not None else ()  # type: ignore[attr-defined]
    for field in fields:
        types = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        for each in types:
            if isinstance(each, inspect.LiteralType):
                found[field.encode_name] = [word for word in each.values if isinstance(word, str)]
    return found


def _unknown_parameter(path: str, name: str, known: list[str]) -> InputError:
    param = f"{path}.{name}"
    hint = did_you_mean(name, known, listed_as="known")
    return UnknownParameterError(param, f"Unknown parameter: '{param}'{hint}.")


def _fields_at(type_: type[Struct] | None, place: str) -> list[str]:
    """Names of the fields of the struct at a place such as `slo`; of `type_` itself where it is empty."""
    found: Any = inspect.type_info(type_)
    for name in filter(None, place.split(".")):
        found = next(field.type for field in found.fields if field.encode_name == name)
        if isinstance(found, inspect.UnionType):
            found = next(each for each in found.types if isinstance(each, inspect.StructType))
    return [field.encode_name for field in found.fields]


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
