from __future__ import annotations

import pytest

from eventlm.replay.expressions.errors import ExpressionError, not_known
from eventlm.replay.expressions.evaluation import (
    Value,
    check_names,
    check_texts,
    check_types,
    evaluate,
    holds,
    uses,
    value_of,
)
from eventlm.replay.expressions.parser import parse
from eventlm.replay.expressions.syntax import Attribute, CallExpression, Name

_NAMES: dict[str, Value] = {"free": 4, "running": 5, "event": "preempt", "paused": True, "oldest": None}


class _Request:
    skips = 3


class _Facts:
    """Names from a table, and `req(N)` and `twice(N)`."""

    def name(self, node: Name) -> object:
        if node.name not in _NAMES:
            raise not_known("name", node.name, node.column, _NAMES)
        return _NAMES[node.name]

    def call(self, node: CallExpression) -> object:
        [argument] = node.arguments
        if node.name == "req":
            return _Request()
        value = value_of(argument, self)
        assert isinstance(value, int)
        return 2 * value

    def attribute(self, of: object, node: Attribute) -> object:
        return getattr(of, node.name)


def _value(source: str) -> Value:
    return evaluate(parse(source), _Facts())


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("free < 5 and running > 3", True),
        ("free > 5 or running > 9", False),
        ("not free > 5", True),
        ('event == "preempt"', True),
        ("event != 'preempt'", False),
        ("'a' < 'b'", True),
        ("1 + 2 * 3 - -4", 11),
        ("7 / 2", 3),
        ("-7 / 2", -4),
        ("(1 + 2) * 1ms", 3_000_000),
        ("req(17).skips > 2", True),
        ("twice(free + 1)", 10),
        ("paused", True),
        ("paused == (1 < 2)", True),
    ],
)
def test_values(source: str, value: Value) -> None:
    found = _value(source)
    assert found == value
    assert type(found) is type(value)


def test_the_unknown_makes_comparisons_false() -> None:
    assert [_value(f"oldest {sign} 3") for sign in ("==", "!=", "<", ">")] == [False] * 4
    assert _value("oldest + 3") is None
    assert _value("-oldest") is None
    assert _value("1 / 0") is None
    assert _value("not oldest") is True
    assert _value("oldest == 'text'") is False
    assert holds(parse("oldest"), _Facts()) is False


@pytest.mark.parametrize(
    ("source", "column", "word"),
    [
        ('"a" < 3', 5, "a text and a number"),
        ("free == paused", 6, "a number and a truth value"),
        ("paused < paused", 8, "no order"),
        ("free and paused", 1, "neither true nor false"),
        ("paused and event", 12, "neither true nor false"),
        ("not free", 5, "neither true nor false"),
        ("1 + 'a'", 3, "needs numbers, not a text"),
        ("-paused", 1, "needs numbers, not a truth value"),
        ("free < runing", 8, "did you mean running?"),
        ("req(1) > 2", 1, "attributes"),
        ("(1 + 2).x", 9, "has attributes"),
    ],
)
def test_errors_are_at_their_columns(source: str, column: int, word: str) -> None:
    with pytest.raises(ExpressionError) as found:
        _value(source)
    assert (found.value.column, found.value.source) == (column, source)
    assert word in found.value.problem


def test_only_what_is_needed_is_evaluated() -> None:
    assert _value("paused or runing > 1") is True


def test_a_condition_must_be_true_or_false() -> None:
    with pytest.raises(ExpressionError, match="column 6"):
        holds(parse("free + 1"), _Facts())


def test_what_an_expression_uses() -> None:
    found = uses(parse("free < 5 and req(17).skips > free or p99(ttft, prompt <= 2) > 1"))
    assert found.names == ("free", "ttft", "prompt")
    assert found.calls == ("req", "p99")
    assert found.attributes == ("skips",)


def test_names_are_checked_before_anything_runs() -> None:
    expression = parse("free < 5 or reqs(x).skips > 1")
    with pytest.raises(ExpressionError) as found:
        check_names(expression, names=["free"], calls=["req"])
    assert (found.value.column, found.value.source) == (13, expression.source)
    with pytest.raises(ExpressionError, match="column 12"):
        check_names(parse("1 < 2 and (fre > 2)"), names=["free"], calls=[])
    # The arguments of a call may be names of another kind.
    check_names(parse("free < 5 or not req(x).skips > 1"), names=["free"], calls=["req"])


@pytest.mark.parametrize(
    ("source", "column"),
    [
        ("free", 1),
        ("free > 1 or running", 13),
        ("free > 9 and (paused or event > 3)", 31),
        ("not (free < 9 or not running)", 22),
        ("paused == (free > 9 and event)", 25),
        ("free + event > 3", 6),
    ],
)
def test_types_are_checked_where_evaluation_would_not_come_to(source: str, column: int) -> None:
    with pytest.raises(ExpressionError) as found:
        check_types(parse(source).root, _Facts())
    assert found.value.column == column


def test_right_types_pass() -> None:
    check_types(parse("free > 9 and (paused or event == 'x') or not (-free < 2) == paused").root, _Facts())


def test_texts_that_a_name_never_is() -> None:
    texts = {"event": ["preempt", "launch"]}
    check_texts(parse("event == 'preempt' or 'launch' != event or reason == 'x' or event == 3").root, texts)
    for source, column in (("free > 1 or event == 'preempted'", 22), ("'preempted' != event", 1)):
        with pytest.raises(ExpressionError, match=r"no event preempted; did you mean preempt\?") as found:
            check_texts(parse(source).root, texts)
        assert found.value.column == column
