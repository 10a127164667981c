"""Evaluates an expression over whole columns at once, as `evaluate` does for one value of each name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import add, eq, floordiv, ge, gt, le, lt, mul, ne, sub
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.syntax import Binary, Name, Node, Number, Text, Unary

#: Beyond it sums and products are computed with Python's integers.
_SAFE = float(1 << 62)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {"+": add, "-": sub, "*": mul, "/": floordiv}


class Vector(NamedTuple):
    """A column. values: integers, or truth values. is_known: where there is a value; None: everywhere.
    texts: what the integers stand for, if they stand for texts.
    """

    values: Any
    is_known: NDArray[np.bool_] | None = None
    texts: tuple[str, ...] | None = None

    @property
    def kind(self) -> str:
        """As errors call it."""
        if self.texts is not None:
            return "a text"
        return "a truth value" if np.asarray(self.values).dtype == np.bool_ else "a number"


def truth(node: Node, columns: Mapping[str, Vector], num_rows: int) -> NDArray[np.bool_]:
    """Where a part of an expression is true. Raises ExpressionError without a source."""
    found = vector(node, columns, num_rows)
    if found.kind != "a truth value":
        raise ExpressionError(node.column, f"{found.kind} is neither true nor false; compare it, such as with > 0")
    values = np.broadcast_to(found.values, num_rows)
    return values if found.is_known is None else values & found.is_known


def vector(node: Node, columns: Mapping[str, Vector], num_rows: int) -> Vector:
    """The values of a part. Raises ExpressionError without a source."""
    if isinstance(node, Number):
        return Vector(np.int64(node.value))
    if isinstance(node, Text):
        return Vector(np.int64(0), None, (node.value,))
    if isinstance(node, Name):
        return columns[node.name]
    if isinstance(node, Unary):
        if node.operator == "not":
            return Vector(~truth(node.operand, columns, num_rows))
        operand = vector(node.operand, columns, num_rows)
        _need_number(operand, node)
        return Vector(-operand.values, operand.is_known)
    if not isinstance(node, Binary):
        raise ExpressionError(node.column, "calls and attributes are no columns")
    if node.operator in ("and", "or"):
        left, right = truth(node.left, columns, num_rows), truth(node.right, columns, num_rows)
        return Vector(left & right if node.operator == "and" else left | right)
    return _binary(node, vector(node.left, columns, num_rows), vector(node.right, columns, num_rows))


def _binary(node: Binary, left: Vector, right: Vector) -> Vector:
    is_known = _both(left.is_known, right.is_known)
    if node.operator not in _COMPARE:
        _need_number(left, node)
        _need_number(right, node)
        return _arithmetic(node, left.values, right.values, is_known)
    if left.kind != right.kind:
        raise ExpressionError(node.column, f"{left.kind} and {right.kind} cannot be compared")
    if left.kind == "a truth value" and node.operator not in ("==", "!="):
        raise ExpressionError(node.column, f"truth values have no order; write == or !=, not {node.operator}")
    first, second = _comparable(left, right)
    found = np.asarray(_COMPARE[node.operator](first, second), np.bool_)
    # What is not known makes a comparison false, not unknown.
    return Vector(found if is_known is None else found & is_known)


def _comparable(left: Vector, right: Vector) -> tuple[Any, Any]:
    """Values that compare as the texts do, if these are texts."""
    if left.texts is None or right.texts is None:
        return left.values, right.values
    ranks = {text: rank for rank, text in enumerate(sorted({*left.texts, *right.texts}))}

    def ranked(of: Vector) -> Any:
        return np.array([ranks[text] for text in of.texts or ()], np.int64)[np.maximum(of.values, 0)]

    return ranked(left), ranked(right)


def _arithmetic(node: Binary, left: Any, right: Any, is_known: NDArray[np.bool_] | None) -> Vector:
    if node.operator == "/":
        is_defined = np.asarray(right != 0)
        return Vector(floordiv(left, np.where(is_defined, right, 1)), _both(is_known, is_defined))
    compute = _ARITHMETIC[node.operator]
    if compute(_largest(left), _largest(right)) >= _SAFE or _largest(left) + _largest(right) >= _SAFE:
        left, right = np.asarray(left).astype(object), np.asarray(right).astype(object)
    return Vector(compute(left, right), is_known)


def _largest(values: Any) -> float:
    return max((abs(float(each)) for each in (np.min(values), np.max(values))), default=0.0) if np.size(values) else 0.0


def _both(first: NDArray[np.bool_] | None, second: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    if first is None or second is None:
        return second if first is None else first
    return np.asarray(first & second)


def _need_number(of: Vector, node: Unary | Binary) -> None:
    if of.kind != "a number":
        raise ExpressionError(node.column, f"{node.operator} needs numbers, not {of.kind}")
