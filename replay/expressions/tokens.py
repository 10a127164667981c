"""Splits an expression into tokens."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal, NamedTuple, TypeAlias, cast

from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.syntax import UNITS

#: Characters of an expression.
MAX_LENGTH = 1000
MAX_NUMBER = 2**63 - 1

TokenKind: TypeAlias = Literal["number", "text", "word", "sign", "end"]

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>[0-9][0-9_]*(?:\.[0-9]+)?)(?P<unit>[^\W_0-9][\w]*|%|)
    |(?P<word>[^\W0-9]\w*)
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<sign>==|!=|<=|>=|[<>+\-*/(),.=])
    |(?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_SPACE = re.compile(r"\s*")
#: What other languages write.
_FOREIGN = {"&": "and", "|": "or", "!": "not"}


class Token(NamedTuple):
    """A token. text: as written, or what is between the quotes. value: of a number."""

    kind: TokenKind
    text: str
    column: int
    value: int = 0


def tokenize(source: str) -> list[Token]:
    """All tokens; the last is the end. Raises ExpressionError."""
    if len(source) > MAX_LENGTH:
        raise ExpressionError(MAX_LENGTH + 1, f"an expression has at most {MAX_LENGTH:,} characters")
    found: list[Token] = []
    position = 0
    while not found or found[-1].kind != "end":
        match = _TOKEN.match(source, position)
        if match is None:
            raise _unreadable(source, _SPACE.match(source, position).end())  # type: ignore[union-attr]
        position = match.end()
        found.append(_token(match))
    return found


def _token(match: re.Match[str]) -> Token:
    kind = match.lastgroup or "end"
    if kind == "unit":
        return _number(match)
    column = match.start(kind) + 1
    text = match[kind]
    if kind == "text":
        return Token("text", re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL), column)
    return Token(cast(TokenKind, kind), text, column)


def _number(match: re.Match[str]) -> Token:
    column, unit = match.start("number") + 1, match["unit"]
    if unit and unit not in UNITS:
        raise ExpressionError(match.start("unit") + 1, f"{unit!r} is no unit; write one of {', '.join(UNITS)}")
    value = Decimal(match["number"].replace("_", "")) * UNITS.get(unit, 1)
    text = match["number"] + unit
    if value > MAX_NUMBER:
        raise ExpressionError(column, f"{text} is too large; the largest number is {MAX_NUMBER:,}")
    if value != int(value):
        raise ExpressionError(column, f"{text} is no integer; times are whole nanoseconds, such as 1.5ms")
    return Token("number", text, column, int(value))


def _unreadable(source: str, position: int) -> ExpressionError:
    character = source[position]
    if character in "\"'":
        return ExpressionError(position + 1, f"the text has no closing {character}")
    if character in _FOREIGN:
        return ExpressionError(position + 1, f"{character!r} is no operator; write {_FOREIGN[character]}")
    return ExpressionError(position + 1, f"{character!r} has no meaning here")
