"""From a validation error of msgspec to the `InputError` that names the field at fault."""

from __future__ import annotations

import re

from eventlm.errors import InputError, InvalidTypeError, MissingParameterError

_MISSING_FIELD = re.compile(r"Object missing required field `([^`]*)`")
_WRONG_LENGTH = re.compile(r"Expected `(str|array|object)` of length (?:>= 1|<= (\d+))")
_UNITS = {"str": "characters", "array": "items", "object": "pairs"}
_OUT_OF_BOUNDS = re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) ([^,]+)(?:, got (.*))?", re.DOTALL)
#: How a bound is said, in words and by pydantic's name of the error, which vLLM's callers look for.
_BOUNDS = {
    ">=": ("at least", "greater_than_equal"),
    "<=": ("at most", "less_than_equal"),
    ">": ("greater than", "greater_than"),
    "<": ("less than", "less_than"),
}
#: Of a value in a message.
_MAX_CHARACTERS = 40


def field_error(problem: str, path: str, value: object = None) -> InputError:
    """The error for a problem such as "Expected `int`, got `str`" at a path such as `messages[0].role`.

    `value`: what is there, if it is known; it is quoted where it is a number out of its bounds.
    """
    if missing := _MISSING_FIELD.match(problem):
        return MissingParameterError(f"{path}.{missing[1]}" if path else missing[1])
    if length := _WRONG_LENGTH.fullmatch(problem):
        problem = f"expected at most {length[2]} {_UNITS[length[1]]}" if length[2] else "it must not be empty"
    if bound := _OUT_OF_BOUNDS.fullmatch(problem):
        return out_of_bounds(path, bound[1], bound[2], bound[3] if value is None else value)
    kind, word = (InvalidTypeError, "type") if ", got `" in problem else (InputError, "value")
    return kind(path or None, f"Invalid {word} for '{path}': {problem[:1].lower()}{problem[1:]}.")


def out_of_bounds(path: str, sign: str, bound: object, got: object | None = None) -> InputError:
    """The error for a number that is not `sign` (such as ">=") its bound. `got`: the number, if it is known."""
    words, name = _BOUNDS[sign]
    got = int(got) if isinstance(got, float) and got.is_integer() else got
    found = "" if got is None else f", got {str(got)[:_MAX_CHARACTERS]}"
    return InputError(path, f"Invalid value for '{path}': {path} must be {words} {bound}{found} ({name}).")


def split_message(message: str) -> tuple[str, str]:
    """The problem and the path of a message such as "Expected `int`, got `str` - at `$.messages[0].role`".

    Keys of an object are the client's own words, "[...]" in such a message; the path ends before them.
    """
    problem, _, location = message.partition(" - at ")
    return problem, location.strip("`").rpartition("$")[2].removeprefix(".").replace("[...]", "")
