"""The syntax tree of an expression.

    expression  = conjunction {"or" conjunction}
    conjunction = negation {"and" negation}
    negation    = "not" negation | comparison
    comparison  = sum [("==" | "!=" | "<" | "<=" | ">" | ">=") sum]
    sum         = product {("+" | "-") product}
    product     = signed {("*" | "/") signed}
    signed      = "-" signed | attribute
    attribute   = primary {"." name}
    primary     = number [unit] | text | name | call | "(" expression ")"
    call        = name "(" [argument {"," argument}] ")"
    argument    = [name "="] expression

Columns count characters from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from msgspec import Struct

BinaryOperator: TypeAlias = Literal["or", "and", "==", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/"]
UnaryOperator: TypeAlias = Literal["not", "-"]

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")

#: What a number may be followed by. Times are nanoseconds, shares parts per million.
UNITS = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "min": 60_000_000_000,
    "%": 10_000,
    "k": 1_000,
    "M": 1_000_000,
}


class Number(Struct, frozen=True, kw_only=True):
    """An integer, its unit multiplied in."""

    value: int
    column: int = 1


class Text(Struct, frozen=True, kw_only=True):
    """What stood between quotes."""

    value: str
    column: int = 1


class Name(Struct, frozen=True, kw_only=True):
    """A word without parentheses."""

    name: str
    column: int = 1


class Keyword(Struct, frozen=True, kw_only=True):
    """An argument with a name."""

    name: str
    value: Node
    column: int = 1


class CallExpression(Struct, frozen=True, kw_only=True):
    """`name(arguments, keywords)`. The environment decides what the arguments stand for."""

    name: str
    arguments: list[Node] = []
    keywords: list[Keyword] = []
    column: int = 1


class Attribute(Struct, frozen=True, kw_only=True):
    """`of.name`; the column is the name's."""

    of: Node
    name: str
    column: int = 1


class Unary(Struct, frozen=True, kw_only=True):
    """An operator with one operand."""

    operator: UnaryOperator
    operand: Node
    column: int = 1


class Binary(Struct, frozen=True, kw_only=True):
    """An operator between two operands; the column is the operator's."""

    operator: BinaryOperator
    left: Node
    right: Node
    column: int = 1


Node: TypeAlias = Number | Text | Name | CallExpression | Attribute | Unary | Binary


class Expression(Struct, frozen=True, kw_only=True):
    """A parsed expression and its text, which errors quote."""

    source: str
    root: Node


def walk(node: Node) -> Iterator[Node]:
    """A node and all that it is made of, from left to right, each before its parts."""
    yield node
    if isinstance(node, CallExpression):
        parts = [*node.arguments, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, Binary):
        parts = [node.left, node.right]
    elif isinstance(node, Unary):
        parts = [node.operand]
    else:
        parts = [node.of] if isinstance(node, Attribute) else []
    for part in parts:
        yield from walk(part)
