"""Whole columns are evaluated as single values are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlm.replay.debugger.vectors import Vector, truth, vector
from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.evaluation import truth_of, value_of
from eventlm.replay.expressions.parser import parse
from eventlm.replay.expressions.syntax import Attribute, CallExpression, Name

TEXTS = ("blocks", "paused", "worker")


class Row:
    """An environment of one row."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def name(self, node: Name) -> object:
        return self._values[node.name]

    def call(self, node: CallExpression) -> object:
        raise NotImplementedError

    def attribute(self, of: object, node: Attribute) -> object:
        raise NotImplementedError


def columns_of(rows: list[dict[str, Any]]) -> dict[str, Vector]:
    found = {}
    for name in ("a", "b"):
        values = [row[name] for row in rows]
        known = np.array([value is not None for value in values])
        found[name] = Vector(np.array([0 if value is None else value for value in values], np.int64), known)
    causes = [row["t"] for row in rows]
    positions = np.array([-1 if cause is None else TEXTS.index(cause) for cause in causes], np.int64)
    found["t"] = Vector(positions, positions >= 0, TEXTS)
    return found


NUMBERS = st.none() | st.integers(-5, 5) | st.sampled_from([2**40, -(2**62), 2**63 - 1])
ROWS = st.lists(
    st.fixed_dictionaries({"a": NUMBERS, "b": NUMBERS, "t": st.none() | st.sampled_from(TEXTS)}), min_size=1, max_size=6
)
OPERANDS = st.recursive(
    st.sampled_from(["a", "b", "0", "3", "9223372036854775807"]),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner) | st.builds("-{}".format, inner)
    ),
    max_leaves=4,
)
COMPARED = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
CONDITIONS = st.recursive(
    st.builds("{} {} {}".format, OPERANDS, COMPARED, OPERANDS)
    | st.builds('t {} "{}"'.format, COMPARED, st.sampled_from([*TEXTS, "other"])),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner)
        | st.builds("not ({})".format, inner)
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=200)
@given(ROWS, CONDITIONS)
def test_conditions_hold_in_the_same_rows(rows: list[dict[str, Any]], text: str) -> None:
    node = parse(text).root
    expected = [truth_of(node, Row(row)) for row in rows]
    assert truth(node, columns_of(rows), len(rows)).tolist() == expected


@settings(deadline=None, max_examples=200)
@given(ROWS, OPERANDS)
def test_values_are_the_same(rows: list[dict[str, Any]], text: str) -> None:
    node = parse(text).root
    found = vector(node, columns_of(rows), len(rows))
    known = np.broadcast_to(True if found.is_known is None else found.is_known, len(rows))
    values = np.broadcast_to(np.asarray(found.values), len(rows)).tolist()
    assert [value if is_known else None for value, is_known in zip(values, known, strict=True)] == [
        value_of(node, Row(row)) for row in rows
    ]


@pytest.mark.parametrize("text", ["a + 1", 'a == "x"', "t < 5", "-t > 1", "t + 1 > 2", "(a > 1) < (b > 1)", "not a"])
def test_the_same_mistakes_are_found_at_the_same_columns(text: str) -> None:
    rows = [{"a": 1, "b": 2, "t": "blocks"}]
    node = parse(text).root
    with pytest.raises(ExpressionError) as error:
        truth_of(node, Row(rows[0]))
    with pytest.raises(ExpressionError) as same:
        truth(node, columns_of(rows), 1)
    assert (same.value.column, same.value.problem) == (error.value.column, error.value.problem)
