from __future__ import annotations

import pytest

from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.parser import MAX_DEPTH, MAX_NODES, parse
from eventlm.replay.expressions.syntax import Attribute, Binary, CallExpression, Keyword, Name, Number, Text, Unary


def test_operators_bind_as_usual() -> None:
    assert parse("a or b and not c == 1 + 2 * -d").root == Binary(
        operator="or",
        left=Name(name="a"),
        right=Binary(
            operator="and",
            left=Name(name="b", column=6),
            right=Unary(
                operator="not",
                operand=Binary(
                    operator="==",
                    left=Name(name="c", column=16),
                    right=Binary(
                        operator="+",
                        left=Number(value=1, column=21),
                        right=Binary(
                            operator="*",
                            left=Number(value=2, column=25),
                            right=Unary(operator="-", operand=Name(name="d", column=30), column=29),
                            column=27,
                        ),
                        column=23,
                    ),
                    column=18,
                ),
                column=12,
            ),
            column=8,
        ),
        column=3,
    )


def test_a_call_has_arguments_and_keywords() -> None:
    assert parse("p99(ttft, policy='edf')").root == CallExpression(
        name="p99",
        arguments=[Name(name="ttft", column=5)],
        keywords=[Keyword(name="policy", value=Text(value="edf", column=18), column=11)],
    )
    assert parse("f()").root == CallExpression(name="f")


def test_calls_and_names_have_attributes() -> None:
    assert parse("req(17).skips").root == Attribute(
        of=CallExpression(name="req", arguments=[Number(value=17, column=5)]), name="skips", column=9
    )


@pytest.mark.parametrize(
    ("source", "column", "word"),
    [
        ("", 1, "not the end"),
        ("free <", 7, "not the end"),
        ("free < < 5", 8, "not '<'"),
        ("free < 5 running", 10, "an operator or the end"),
        ("(free < 5", 10, "belongs to column 1"),
        ("p99(ttft", 9, "belongs to column 4"),
        ("p99(ttft ttft)", 10, "belongs to column 4"),
        ("free = 5", 6, "write == to compare"),
        ("1 < 2 < 3", 7, "chained"),
        ("a == not b", 6, "a number, a text or a name"),
        ("req(1).5", 8, "the name of an attribute"),
        ("f(a=1, a=2)", 8, "twice"),
        ("f(a=1, 2)", 8, "goes before"),
        ("f(,)", 3, "not ','"),
        ("(" * (MAX_DEPTH + 1) + "1", MAX_DEPTH + 1, "nested"),
        ("not " * (MAX_DEPTH + 1) + "a", 4 * MAX_DEPTH + 1, "nested"),
        ("-" * (MAX_DEPTH + 1) + "a", MAX_DEPTH + 1, "nested"),
        ("+".join("a" * (MAX_NODES // 2 + 1)), MAX_NODES, "operands and operators"),
    ],
)
def test_what_does_not_parse_is_pointed_at(source: str, column: int, word: str) -> None:
    with pytest.raises(ExpressionError) as found:
        parse(source)
    assert word in found.value.problem
    assert found.value.source == source
    assert found.value.column == column
