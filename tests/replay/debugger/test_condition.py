"""What an expression is about, and what is left of it for each kind of event."""

from __future__ import annotations

import pytest

from eventlm.replay.debugger.condition import Condition
from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.formatting import format_expression


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("free < 5 and running > 3", "columns"),
        ("time > 12.5s", "columns"),
        ("replica == 1 and waiting > 0", "columns"),
        ("replica == 1", "lines"),
        ("s > 4", "lines"),
        ('event == "preempt" and request == 17', "lines"),
        ('event == "launch" and free < 5', "lines"),
        ("req(17).skips > 2", "core"),
        ('policy == "edf"', "core"),
        ('event == "launch" and replica(0).free < 5', "core"),
    ],
)
def test_the_cheapest_source(text: str, source: str) -> None:
    assert Condition(text).source == source


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("fre < 5", 1, "did you mean free"),
        ("event == 'preempted'", 10, "no event preempted; did you mean preempt?"),
        ("free < 5 and reqest == 2", 14, "did you mean request"),
        ("req > 5", 1, "req is a function"),
        ("rek(17).skips", 1, "there is no function rek"),
        ("req(17).skip > 1", 9, "did you mean skips"),
        ("req(x).skips > 1", 1, "write req(N)"),
        ("seq(1).skips > 1", 1, "write seq(N, I)"),
        ("free.x > 1", 6, "only what a call gives"),
        ("1 < 2", 1, "names nothing of the run"),
        ("free <", 7, "expected a number"),
    ],
)
def test_errors_point_at_a_column(text: str, column: int, problem: str) -> None:
    with pytest.raises(ExpressionError) as error:
        Condition(text)
    assert (error.value.column, error.value.source) == (column, text)
    assert problem in error.value.problem


@pytest.mark.parametrize(
    ("text", "tags", "left"),
    [
        ('event == "launch" and tokens > 5', {"launch"}, "tokens > 5"),
        ('(event == "launch" or event == "emit") and tokens > 5', {"launch", "emit"}, "tokens > 5"),
        ("bucket > 2", {"launch"}, "bucket > 2"),
        ('not (event != "emit" or tokens < 2)', {"emit"}, "not tokens < 2"),
        ("by == 4 and free < 2", {"preempt"}, "by == 4 and free < 2"),
    ],
)
def test_what_is_left_for_a_tag(text: str, tags: set[str], left: str) -> None:
    found = Condition(text).by_tag()
    assert set(found) == tags
    assert {format_expression(node) for node in found.values()} == {left}


def test_an_absent_field_is_no_reason_to_leave_out_its_negation() -> None:
    assert len(Condition("not (bucket > 2)").by_tag()) > 20
