"""What an expression is about, and so what answers it: the index's columns, the lines of the log, or the core.

The names of the three:

* gauges, of each replica as after each drain: `free`, `held`, `cached`, `waiting`, `running`, `partial`, `in_flight`,
  `oldest_wait`, `head_cause`, `head_request`, `head_index`, `head_lacking`, and `live`, `replica`;
* events: `event`, `s`, `cause` and their fields (see `eventlm.replay.debugger.event_fields`);
* the core's state: `policy`, `paused`, `closing`, `timers`, `suspects`, and the calls `req(N)`, `seq(N, I)` and
  `replica(R)` with their attributes.

`time` belongs to all three. Gauges hold for any replica, or for the one of which `replica == R` is asked; beside fields
of an event that names a replica, for that one.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from eventlm.replay.debugger.event_fields import COMMON, FIELDS, NAMES, has_field
from eventlm.replay.debugger.gauge_columns import HEAD_CAUSES
from eventlm.replay.expressions.errors import ExpressionError, not_known
from eventlm.replay.expressions.evaluation import Environment, check_texts, truth_of, uses
from eventlm.replay.expressions.parser import parse
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

GAUGES = frozenset(
    (
        "free",
        "held",
        "cached",
        "waiting",
        "running",
        "partial",
        "in_flight",
        "oldest_wait",
        "head_cause",
        "head_request",
        "head_index",
        "head_lacking",
        "live",
    )
)
#: Names that gauges and events share.
SHARED = frozenset(("replica", "time"))
STATE = frozenset(("policy", "paused", "closing", "timers", "suspects"))
SEQUENCE_ATTRIBUTES = (
    "state",
    "live",
    "tokens",
    "prompt_tokens",
    "output_tokens",
    "launched_tokens",
    "cached_tokens",
    "blocks",
    "skips",
    "evictions",
    "admissions",
    "in_flight",
    "replica",
    "home",
    "priority",
    "key",
)
REPLICA_ATTRIBUTES = (
    "up",
    "epoch",
    "waiting",
    "running",
    "partial",
    "free",
    "held",
    "cached",
    "in_flight",
    "next_step",
)
#: By function, what its value has; how many arguments it takes; and how it is written.
CALLS = {"req": SEQUENCE_ATTRIBUTES, "seq": SEQUENCE_ATTRIBUTES, "replica": REPLICA_ATTRIBUTES}
_NUM_ARGUMENTS = {"req": (1, 2), "seq": (2, 2), "replica": (1, 1)}
_CALL_FORMS = {"req": "req(N) or req(N, I)", "seq": "seq(N, I)", "replica": "replica(R)"}

Source: TypeAlias = Literal["columns", "lines", "core"]
_UNKNOWN = object()


class Condition:
    """A checked expression. source: the cheapest that answers it. reads_*: which names it uses."""

    def __init__(self, text: str) -> None:
        """Raises ExpressionError."""
        self.expression: Expression = parse(text)
        used = uses(self.expression)
        try:
            _check(self.expression.root)
            check_texts(self.expression.root, {"event": FIELDS, "head_cause": HEAD_CAUSES})
        except ExpressionError as error:
            raise error.located(text) from None
        names = set(used.names)
        self.text = text
        self.names = used.names
        self.reads_core = bool(names & STATE or used.calls)
        self.reads_gauges = bool(names & GAUGES)
        #: `time` alone, or `replica` beside gauges, needs no event.
        self.reads_events = bool((names & NAMES) - SHARED) or ("replica" in names and not self.reads_gauges)
        #: The lines of the log answer it.
        self.is_of_events = not (self.reads_core or self.reads_gauges)
        #: Names to read from events. An event's replica says whose gauges count.
        self.event_names = (*used.names, *(["replica"] if self.reads_gauges and "replica" not in names else []))
        if not names and not used.calls:
            raise ExpressionError(1, "it names nothing of the run", text)
        self.source: Source = "core" if self.reads_core else "lines" if self.reads_events else "columns"

    def by_tag(self) -> dict[str, Node]:
        """By the tags of events that may fulfil it: what is left to evaluate of it."""
        found = {}
        for tag in FIELDS:
            left = _reduced(self.expression.root, tag)
            if left is not False:
                found[tag] = self.expression.root if left is True else left
        return found

    def holds(self, environment: Environment, node: Node | None = None) -> bool:
        """Whether it is true, or what is left of it. Raises ExpressionError."""
        try:
            return truth_of(self.expression.root if node is None else node, environment)
        except ExpressionError as error:
            raise error.located(self.text) from None


def _check(root: Node) -> None:
    for node in walk(root):
        if isinstance(node, Name):
            if node.name not in GAUGES | SHARED | STATE | NAMES:
                if node.name in CALLS:
                    raise ExpressionError(node.column, f"{node.name} is a function; write {_CALL_FORMS[node.name]}")
                raise not_known("name", node.name, node.column, GAUGES | SHARED | STATE | NAMES)
        elif isinstance(node, CallExpression):
            _check_call(node)
        elif isinstance(node, Attribute):
            of = node.of
            if not isinstance(of, CallExpression):
                raise ExpressionError(node.column, "only what a call gives has attributes, such as req(17).skips")
            if of.name in CALLS and node.name not in CALLS[of.name]:
                raise not_known("attribute", node.name, node.column, CALLS[of.name])


def _check_call(node: CallExpression) -> None:
    if node.name not in CALLS:
        raise not_known("function", node.name, node.column, CALLS)
    least, most = _NUM_ARGUMENTS[node.name]
    given = [each for each in node.arguments if isinstance(each, Number)]
    if node.keywords or len(given) != len(node.arguments) or not least <= len(given) <= most:
        raise ExpressionError(node.column, f"write {_CALL_FORMS[node.name]} with whole numbers")


def _reduced(node: Node, tag: str) -> Node | bool:
    """A condition, given the tag of an event: decided, or what is left of it."""
    if isinstance(node, Unary) and node.operator == "not":
        operand = _reduced(node.operand, tag)
        return not operand if isinstance(operand, bool) else Unary(operator="not", operand=operand, column=node.column)
    if not isinstance(node, Binary):
        return node if _constant(node, tag) is not None else False
    if node.operator in ("and", "or"):
        decides = node.operator == "or"
        left, right = _reduced(node.left, tag), _reduced(node.right, tag)
        if left is decides or right is decides:
            return decides
        if isinstance(left, bool):
            return right
        if isinstance(right, bool):
            return left
        return Binary(operator=node.operator, left=left, right=right, column=node.column)
    left_value, right_value = _constant(node.left, tag), _constant(node.right, tag)
    if left_value is None or right_value is None:
        return False
    if isinstance(left_value, str) and isinstance(right_value, str) and node.operator in ("==", "!="):
        return (left_value == right_value) is (node.operator == "==")
    return node


def _constant(node: Node, tag: str) -> object:
    """The value of an operand as far as the tag tells it: a text, None for one that such an event does not have."""
    if isinstance(node, Text):
        return node.value
    if isinstance(node, Name):
        if node.name == "event":
            return tag
        if node.name in NAMES and node.name not in COMMON and node.name not in SHARED and not has_field(tag, node.name):
            return None
    return _UNKNOWN
