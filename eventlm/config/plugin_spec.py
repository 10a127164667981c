"""Plug-in specs as people write them: `edf:multiplier=2,min_deadline_ms=300`, and back."""

from __future__ import annotations

import re
from typing import Any

from eventlm.config.structs import PluginSpec
from eventlm.errors import UsageError

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": True, "false": False}


def parse_plugin_spec(text: str) -> PluginSpec:
    """`NAME[:PARAMETER=VALUE,...]` as a table; NAME may itself be `module:Class`.

    Raises UsageError that quotes the spec and says what is wrong with it.
    """
    head, equals, _ = text.partition("=")
    colon = head.rfind(":") if equals else len(text)
    name, parameters = text[: max(colon, 0)].strip(), text[colon + 1 :]
    if not name:
        raise UsageError(f"{text!r} names no plug-in; write NAME or NAME:PARAMETER=VALUE,...")
    if name.endswith(":"):
        raise UsageError(f"{text!r} ends in a colon; write NAME or NAME:PARAMETER=VALUE,...")
    if not equals:
        return {"type": name}
    table = parse_parameters(parameters, whole=text)
    if "type" in table:
        raise UsageError(f"{text!r}: the plug-in's name goes first, `type` is no parameter")
    return {"type": name} | table


def parse_parameters(text: str, *, whole: str = "") -> dict[str, Any]:
    """`PARAMETER=VALUE,...` as a table of integers, floats, booleans and strings.

    `whole` is what an error quotes, if `text` is only a part of it. Raises UsageError.
    """
    whole = whole or text
    table: dict[str, Any] = {}
    for assignment in text.split(","):
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not value or not key.isidentifier():
            raise UsageError(f"{whole!r}: {assignment!r} is not of the form PARAMETER=VALUE")
        if key in table:
            raise UsageError(f"{whole!r} gives {key} twice")
        table[key] = parse_value(value)
    return table


def parse_value(text: str) -> bool | int | float | str:
    """The value that `text` looks like: `true`, `3`, `0.5`, `1e-3`; anything else is a string."""
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def format_plugin_spec(spec: PluginSpec) -> str:
    """The spec as `parse_plugin_spec` takes it."""
    parameters = ",".join(f"{key}={format_value(value)}" for key, value in spec.items() if key != "type")
    return f"{spec['type']}:{parameters}" if parameters else str(spec["type"])


def format_value(value: object) -> str:
    """A parameter's value as `parse_value` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
