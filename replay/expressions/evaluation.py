"""Evaluates an expression. What names and calls mean is for an environment to say.

Values are integers (times in nanoseconds, shares in parts per million), texts, truth values, and None for what is not
known. An operand that is None makes a comparison false and a sum None. Division rounds down; by zero it gives None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NamedTuple, Protocol, TypeAlias

from eventlm.replay.expressions.errors import ExpressionError, not_known
from eventlm.replay.expressions.syntax import (
    Attribute,
    Binary,
    CallExpression,
    Expression,
    Name,
    Node,
    Number,
    Text,
    Unary,
    walk,
)

Value: TypeAlias = int | str | bool | None

#: Tuples, because a union would be made at every call.
_LITERALS = (Number, Text)
_NAMED = (Name, CallExpression, Attribute)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}


class Environment(Protocol):
    """What an expression is about. Each method raises ExpressionError at the node's column for what it does not know.

    A call may give any object, as long as an attribute is asked of it.
    """

    def name(self, node: Name) -> object:
        """The value of a name."""

    def call(self, node: CallExpression) -> object:
        """The value of a call; its arguments are not evaluated yet."""

    def attribute(self, of: object, node: Attribute) -> object:
        """An attribute of what a call or a name gave."""


class Uses(NamedTuple):
    """Names, called functions and attributes of an expression, each once, in order of appearance."""

    names: tuple[str, ...]
    calls: tuple[str, ...]
    attributes: tuple[str, ...]


def uses(expression: Expression) -> Uses:
    """What an expression uses, inside the arguments of its calls too."""
    names: dict[str, None] = {}
    calls: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for node in walk(expression.root):
        if isinstance(node, Name):
            names[node.name] = None
        elif isinstance(node, CallExpression):
            calls[node.name] = None
        elif isinstance(node, Attribute):
            attributes[node.name] = None
    return Uses(tuple(names), tuple(calls), tuple(attributes))


def check_names(expression: Expression, *, names: Iterable[str], calls: Iterable[str]) -> None:
    """Raise ExpressionError for the first name or call outside any arguments that is not among these."""
    known, functions = frozenset(names), frozenset(calls)

    def check(node: Node) -> None:
        if isinstance(node, Name) and node.name not in known:
            raise not_known("name", node.name, node.column, known)
        if isinstance(node, CallExpression) and node.name not in functions:
            raise not_known("function", node.name, node.column, functions)
        if isinstance(node, Binary):
            check(node.left)
            check(node.right)
        elif isinstance(node, Unary):
            check(node.operand)
        elif isinstance(node, Attribute):
            check(node.of)

    try:
        check(expression.root)
    except ExpressionError as error:
        raise error.located(expression.source) from None


def evaluate(expression: Expression, environment: Environment) -> Value:
    """The value. Raises ExpressionError."""
    try:
        return value_of(expression.root, environment)
    except ExpressionError as error:
        raise error.located(expression.source) from None


def holds(expression: Expression, environment: Environment) -> bool:
    """Whether it is true. Raises ExpressionError, also for a number or a text."""
    try:
        return truth_of(expression.root, environment)
    except ExpressionError as error:
        raise error.located(expression.source) from None


def truth_of(node: Node, environment: Environment) -> bool:
    """Whether a part is true; what is not known is not. Raises ExpressionError without a source."""
    value = value_of(node, environment)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ExpressionError(node.column, f"{_kind(value)} is neither true nor false; compare it, such as with > 0")


def check_texts(node: Node, texts: Mapping[str, Collection[str]]) -> None:
    """Raise ExpressionError, without a source, where a name is compared with a text that it never is. texts: all that
    a name can be.
    """
    for part in walk(node):
        if isinstance(part, Binary) and part.operator in ("==", "!="):
            for name, text in ((part.left, part.right), (part.right, part.left)):
                if isinstance(name, Name) and isinstance(text, Text) and name.name in texts:
                    known = texts[name.name]
                    if text.value not in known:
                        raise not_known(name.name, text.value, text.column, known)


def check_types(node: Node, samples: Environment) -> None:
    """Raise ExpressionError, without a source, for operators that are given what they cannot take, in a part that is to
    be true or false. samples: gives any value of the right type for each name and call.
    """
    truth_of(node, samples)
    # Evaluation may pass over one side of these.
    if isinstance(node, Binary):
        check = check_types if node.operator in ("and", "or") else _check_operand
        check(node.left, samples)
        check(node.right, samples)
    elif isinstance(node, Unary):
        _check_operand(node.operand, samples)


def _check_operand(node: Node, samples: Environment) -> None:
    if isinstance(value_of(node, samples), bool):
        check_types(node, samples)


def value_of(node: Node, environment: Environment) -> Value:
    """The value of a part. Raises ExpressionError without a source."""
    if isinstance(node, Binary):
        if node.operator == "and":
            return truth_of(node.left, environment) and truth_of(node.right, environment)
        if node.operator == "or":
            return truth_of(node.left, environment) or truth_of(node.right, environment)
        return _binary(node, value_of(node.left, environment), value_of(node.right, environment))
    if isinstance(node, _LITERALS):
        return node.value
    if isinstance(node, Unary):
        if node.operator == "not":
            return not truth_of(node.operand, environment)
        value = value_of(node.operand, environment)
        return None if value is None else -_integer(value, node)
    found = _looked_up(node, environment)
    if found is None or isinstance(found, int | str):
        return found
    raise ExpressionError(node.column, "this is no value by itself; ask for one of its attributes, with a dot")


def _looked_up(node: Name | CallExpression | Attribute, environment: Environment) -> object:
    """What the environment gives, a value or not."""
    if isinstance(node, Name):
        return environment.name(node)
    if isinstance(node, CallExpression):
        return environment.call(node)
    if isinstance(node.of, _NAMED):
        return environment.attribute(_looked_up(node.of, environment), node)
    raise ExpressionError(node.column, "only what a name or a call stands for has attributes")


def _binary(node: Binary, left: Value, right: Value) -> Value:
    compare = _COMPARE.get(node.operator)
    if left is None or right is None:
        return None if compare is None else False
    if compare is not None:
        if type(left) is not type(right):
            raise ExpressionError(node.column, f"{_kind(left)} and {_kind(right)} cannot be compared")
        if isinstance(left, bool) and node.operator not in ("==", "!="):
            raise ExpressionError(node.column, f"truth values have no order; write == or !=, not {node.operator}")
        return compare(left, right)
    first, second = _integer(left, node), _integer(right, node)
    if node.operator == "+":
        return first + second
    if node.operator == "-":
        return first - second
    if node.operator == "*":
        return first * second
    return first // second if second else None


def _integer(value: int | str, node: Unary | Binary) -> int:
    if isinstance(value, bool | str):
        raise ExpressionError(node.column, f"{node.operator} needs numbers, not {_kind(value)}")
    return value


def _kind(value: int | str) -> str:
    if isinstance(value, bool):
        return "a truth value"
    return "a number" if isinstance(value, int) else "a text"
