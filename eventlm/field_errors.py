"""From a validation error of msgspec to the `InputError` that names the field at fault."""

from __future__ import annotations

import re

from eventlm.errors import InputError, InvalidTypeError, MissingParameterError

_MISSING_FIELD = re.compile(r"Object missing required field `([^`]*)`")
_WRONG_LENGTH = re.compile(r"Expected `(str|array|object)` of length (?:>= 1|<= (\d+))")
_UNITS = {"str": "characters", "array": "items", "object": "pairs"}


def field_error(problem: str, path: str) -> InputError:
    """The error for a problem such as "Expected `int`, got `str`" at a path such as `messages[0].role`."""
    if missing := _MISSING_FIELD.match(problem):
        return MissingParameterError(f"{path}.{missing[1]}" if path else missing[1])
    if length := _WRONG_LENGTH.fullmatch(problem):
        problem = f"expected at most {length[2]} {_UNITS[length[1]]}" if length[2] else "it must not be empty"
    kind, word = (InvalidTypeError, "type") if ", got `" in problem else (InputError, "value")
    return kind(path or None, f"Invalid {word} for '{path}': {problem[:1].lower()}{problem[1:]}.")


def split_message(message: str) -> tuple[str, str]:
    """The problem and the path of a message such as "Expected `int`, got `str` - at `$.messages[0].role`".

    Keys of an object are the client's own words, "[...]" in such a message; the path ends before them.
    """
    problem, _, location = message.partition(" - at ")
    return problem, location.strip("`").rpartition("$")[2].removeprefix(".").replace("[...]", "")
