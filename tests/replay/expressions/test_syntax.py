from __future__ import annotations

from eventlm.replay.expressions.parser import parse
from eventlm.replay.expressions.syntax import walk


def test_a_walk_meets_every_node_from_left_to_right() -> None:
    root = parse("not f(a, k=b).x < -2 or 'c' == d").root
    assert [type(node).__name__ for node in walk(root)] == [
        "Binary",
        "Unary",
        "Binary",
        "Attribute",
        "CallExpression",
        "Name",
        "Name",
        "Unary",
        "Number",
        "Binary",
        "Text",
        "Name",
    ]
