"""Writes a syntax tree as an expression that is parsed to the same tree, columns aside."""

from __future__ import annotations

from eventlm.replay.expressions.syntax import (
    COMPARISONS,
    Attribute,
    Binary,
    CallExpression,
    Name,
    Node,
    Number,
    Text,
    Unary,
)

#: How tightly operators bind.
_LEVELS = {"or": 1, "and": 2, "not": 3, **dict.fromkeys(COMPARISONS, 4), "+": 5, "-": 5, "*": 6, "/": 6}
_SIGNED, _ATTRIBUTE = 7, 8


def format_expression(node: Node) -> str:
    """The expression, with no more parentheses than it needs. Numbers have no unit."""
    return _text(node, 0)


def _text(node: Node, level: int) -> str:
    """In parentheses if it binds less tightly than `level`."""
    own, text = _formatted(node)
    return text if own >= level else f"({text})"


def _formatted(node: Node) -> tuple[int, str]:
    if isinstance(node, Number):
        return _ATTRIBUTE, str(node.value)
    if isinstance(node, Text):
        escaped = node.value.replace("\\", "\\\\").replace('"', '\\"')
        return _ATTRIBUTE, f'"{escaped}"'
    if isinstance(node, Name):
        return _ATTRIBUTE, node.name
    if isinstance(node, CallExpression):
        arguments = [_text(argument, 0) for argument in node.arguments]
        arguments += [f"{keyword.name}={_text(keyword.value, 0)}" for keyword in node.keywords]
        return _ATTRIBUTE, f"{node.name}({', '.join(arguments)})"
    if isinstance(node, Attribute):
        # A dot behind a digit would be a decimal point.
        of = _text(node.of, _ATTRIBUTE)
        return _ATTRIBUTE, f"({of}).{node.name}" if isinstance(node.of, Number) else f"{of}.{node.name}"
    if isinstance(node, Unary):
        if node.operator == "not":
            return _LEVELS["not"], f"not {_text(node.operand, _LEVELS['not'])}"
        return _SIGNED, f"-{_text(node.operand, _SIGNED)}"
    return _binary(node)


def _binary(node: Binary) -> tuple[int, str]:
    level = _LEVELS[node.operator]
    # Comparisons cannot be chained; all others associate to the left.
    left = level + 1 if node.operator in COMPARISONS else level
    return level, f"{_text(node.left, left)} {node.operator} {_text(node.right, level + 1)}"
