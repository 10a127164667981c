from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.replay.expressions.formatting import format_expression
from eventlm.replay.expressions.parser import parse
from eventlm.replay.expressions.syntax import (
    COMPARISONS,
    Attribute,
    Binary,
    CallExpression,
    Keyword,
    Name,
    Node,
    Number,
    Text,
    Unary,
)

_NAMES = st.sampled_from(["free", "running", "_x", "p99", "größe", "s"])
_LEAVES: st.SearchStrategy[Node] = st.one_of(
    st.builds(Number, value=st.integers(0, 2**63 - 1)),
    st.builds(Text, value=st.text(max_size=8)),
    st.builds(Name, name=_NAMES),
)


def _larger(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    keywords = st.lists(st.builds(Keyword, name=_NAMES, value=nodes), max_size=2, unique_by=lambda each: each.name)
    return st.one_of(
        st.builds(CallExpression, name=_NAMES, arguments=st.lists(nodes, max_size=2), keywords=keywords),
        st.builds(Attribute, of=nodes, name=_NAMES),
        st.builds(Unary, operator=st.sampled_from(["not", "-"]), operand=nodes),
        st.builds(
            Binary,
            operator=st.sampled_from(["or", "and", *COMPARISONS, "+", "-", "*", "/"]),
            left=nodes,
            right=nodes,
        ),
    )


def _tagged(node: object) -> Any:
    """With the type of each node, and without columns."""
    if isinstance(node, list):
        return [_tagged(each) for each in node]
    if isinstance(node, msgspec.Struct):
        fields = {name: _tagged(getattr(node, name)) for name in node.__struct_fields__ if name != "column"}
        return [type(node).__name__, fields]
    return node


@given(st.recursive(_LEAVES, _larger, max_leaves=12))
def test_what_is_written_is_parsed_to_the_same_tree(node: Node) -> None:
    assert _tagged(parse(format_expression(node)).root) == _tagged(node)


@pytest.mark.parametrize(
    ("source", "formatted"),
    [
        ("((free<5)) and (running>3)", "free < 5 and running > 3"),
        ("(a or b) and c", "(a or b) and c"),
        ("a - (b - c)", "a - (b - c)"),
        ("(a - b) - c", "a - b - c"),
        ("-(a + b) * 2", "-(a + b) * 2"),
        ("p99( ttft,prompt<=256 ) > 5s", "p99(ttft, prompt <= 256) > 5000000000"),
        ("event == 'say \"no\"'", 'event == "say \\"no\\""'),
        ("not (not a)", "not not a"),
        ("(a == b) == c", "(a == b) == c"),
    ],
)
def test_there_are_no_more_parentheses_than_needed(source: str, formatted: str) -> None:
    assert format_expression(parse(source).root) == formatted
