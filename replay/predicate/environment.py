"""What a condition on a simulated run can be about.

    p99(ttft, prompt <= 256) > 5s      preemptions > 50      diverges(policy=edf)      broken

A function over sequences takes a latency and, if need be, a filter. Only sequences that ran to their end have
latencies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

from eventlm.config.load import load_config
from eventlm.config.options import ENGINE_OPTIONS, did_you_mean, options
from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.metrics.trace_metrics import Distribution, distribution
from eventlm.replay.expressions.errors import ExpressionError, not_known
from eventlm.replay.expressions.evaluation import Value, check_names, check_types, truth_of, value_of
from eventlm.replay.expressions.formatting import format_expression
from eventlm.replay.expressions.syntax import Attribute, Binary, CallExpression, Expression, Name, Node, Unary, walk
from eventlm.replay.outcome import LATENCIES, RunOutcome, SequenceOutcome
from eventlm.replay.predicate.observation import Observation
from eventlm.types import PluginKind

#: Observes the same workload with other options.
ObserveOther = Callable[[dict[str, Any]], Observation]

STATISTICS: dict[str, Callable[[Distribution], int]] = {
    "p50": lambda found: found.p50,
    "p90": lambda found: found.p90,
    "p95": lambda found: found.p95,
    "p99": lambda found: found.p99,
    "max": lambda found: found.max,
    "mean": lambda found: int(found.mean),
}
NAMES: dict[str, Callable[[RunOutcome], int]] = {
    "requests": lambda outcome: outcome.num_requests,
    "completed": lambda outcome: sum(each.is_complete for each in outcome.sequences),
    "unfinished": lambda outcome: outcome.num_unfinished,
    "rejected": lambda outcome: sum(outcome.reject_reasons.values()),
    "preemptions": lambda outcome: outcome.num_preemptions,
    "steps": lambda outcome: outcome.num_steps,
    "duration": lambda outcome: outcome.duration_ns,
    "tokens_per_second": lambda outcome: int(outcome.output_tokens_per_second),
    "hit_rate": lambda outcome: outcome.hit_tokens * 1_000_000 // max(outcome.queried_tokens, 1),
}
BROKEN, PLUGIN_FAILURES = "broken", "plugin_failures"
_IN_NANOSECONDS, _IN_PPM = ("duration", *STATISTICS), ("hit_rate",)
ALL_NAMES = (*NAMES, BROKEN, PLUGIN_FAILURES)
COUNT, DIVERGES = "count", "diverges"
CALLS = (*STATISTICS, COUNT, DIVERGES)
#: Fields of a sequence in a filter, beside the latencies.
FIELDS: dict[str, Callable[[SequenceOutcome], Value]] = {
    "sample": lambda sequence: sequence.index,
    "prompt": lambda sequence: sequence.prompt_tokens,
    "output": lambda sequence: sequence.output_tokens,
    "cached": lambda sequence: sequence.cached_tokens,
    "class": lambda sequence: sequence.service_class,
    "preemptions": lambda sequence: sequence.num_preemptions,
    "reason": lambda sequence: sequence.reason,
    "arrived": lambda sequence: sequence.arrived_ns,
}
#: Those that are no number.
TEXT_FIELDS = ("class", "reason")
#: Fields of its request: its index in the workload, from 0, and its priority.
REQUEST_FIELDS = ("request", "priority")
ALL_FIELDS = (*FIELDS, *LATENCIES, *REQUEST_FIELDS)
_BY = "by"


class OutcomeEnvironment:
    """The environment of a condition on a simulated run."""

    def __init__(self, observed: Observation, observe_other: ObserveOther) -> None:
        self._observed = observed
        self._observe_other = observe_other

    def name(self, node: Name) -> Value:
        """A figure of the run; unknown if the run broke an invariant."""
        if node.name == BROKEN:
            return bool(self._observed.broken)
        if node.name == PLUGIN_FAILURES:
            return self._observed.num_plugin_failures
        outcome = self._observed.outcome
        return None if outcome is None else NAMES[node.name](outcome)

    def call(self, node: CallExpression) -> Value:
        """A statistic of a latency, a count, or a comparison with another engine."""
        if self._observed.outcome is None:
            return None
        if node.name == DIVERGES:
            return self._diverges(node)
        if node.name == COUNT:
            return sum(1 for _ in self._chosen(node.arguments))
        latency = _latency(node)
        values = Counter(
            value
            for sequence in self._chosen(node.arguments[1:])
            if sequence.is_complete and (value := getattr(sequence, LATENCIES[latency])) is not None
        )
        return STATISTICS[node.name](distribution(values)) if values else None

    def attribute(self, of: object, node: Attribute) -> Value:
        """There are none."""
        raise not_known("attribute", node.name, node.column, [])

    def _chosen(self, filters: list[Node]) -> Iterator[SequenceOutcome]:
        outcome = self._observed.outcome
        for sequence in outcome.sequences if outcome is not None else []:
            if all(truth_of(each, _SequenceEnvironment(self._observed, sequence)) for each in filters):
                yield sequence

    def _diverges(self, node: CallExpression) -> bool:
        """Whether another engine serves any sequence by more than `by` sooner or later, or not at all."""
        changes, by_ns = _changes(node)
        here, other = self._observed, self._observe_other(changes)
        before, after = _ends(here), _ends(other)
        return any(
            name not in before or name not in after or abs(before[name] - after[name]) > by_ns
            for name in before.keys() | after.keys()
        )


class _SequenceEnvironment:
    """The environment of a filter."""

    def __init__(self, observed: Observation, sequence: SequenceOutcome) -> None:
        self._observed = observed
        self._sequence = sequence

    def name(self, node: Name) -> Value:
        if node.name in FIELDS:
            return FIELDS[node.name](self._sequence)
        if node.name in LATENCIES:
            found: Value = getattr(self._sequence, LATENCIES[node.name])
            return found
        index = self._observed.workload_index[self._sequence.request]
        if node.name == "request":
            return index
        return self._observed.workload.requests[index].arrival.scheduling.priority

    def call(self, node: CallExpression) -> Value:
        raise not_known("function", node.name, node.column, [])

    def attribute(self, of: object, node: Attribute) -> Value:
        raise not_known("attribute", node.name, node.column, [])


def figures_of(expression: Expression, environment: OutcomeEnvironment) -> dict[str, str]:
    """The figures that a condition compares, in words: `{"preemptions": "3", "p99(ttft)": "1.25 s"}`."""
    found: dict[str, str] = {}
    unseen: list[Node] = [expression.root]
    while unseen:
        node = unseen.pop()
        if isinstance(node, Binary):
            unseen += [node.right, node.left]
        elif isinstance(node, Unary):
            unseen.append(node.operand)
        elif isinstance(node, Name | CallExpression):
            found[format_expression(node)] = _in_words(node.name, value_of(node, environment))
    return found


def _in_words(name: str, value: Value) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool | str):
        return str(value).lower()
    if name in _IN_NANOSECONDS:
        return f"{value / 1e9:,.9g} s"
    return f"{value / 10_000:g}%" if name in _IN_PPM else f"{value:,}"


def check_condition(expression: Expression) -> None:
    """Raise ExpressionError for a name, function, argument, option or plug-in that there is not, and for values of the
    wrong type.
    """
    check_names(expression, names=ALL_NAMES, calls=CALLS)
    try:
        for node in walk(expression.root):
            if isinstance(node, Attribute):
                raise not_known("attribute", node.name, node.column, [])
            if isinstance(node, CallExpression):
                _check_call(node)
        check_types(expression.root, _SampleRun())
    except ExpressionError as error:
        raise error.located(expression.source) from None


def _check_call(node: CallExpression) -> None:
    if node.name not in CALLS:
        raise not_known("function", node.name, node.column, CALLS)
    if node.name == DIVERGES:
        changes, _ = _changes(node)
        for keyword in node.keywords:
            if keyword.name in changes:
                _check_option(keyword.name, changes[keyword.name], keyword.column)
        return
    if node.keywords:
        raise ExpressionError(node.keywords[0].column, f"{node.name} takes no argument with a name")
    filters = node.arguments
    if node.name != COUNT:
        _latency(node)
        filters = node.arguments[1:]
    if len(filters) > 1:
        raise ExpressionError(filters[1].column, "there is one filter; join two with `and`")
    for each in filters:
        for part in walk(each):
            if isinstance(part, Name) and part.name not in ALL_FIELDS:
                raise not_known("field of a sequence", part.name, part.column, ALL_FIELDS)
            if isinstance(part, CallExpression):
                raise ExpressionError(part.column, "a filter calls no function")
        check_types(each, _SampleSequence())


def _check_option(name: str, value: Any, column: int) -> None:
    """By itself: whether it fits the others is known when it meets them."""
    try:
        load_config(None, {name: value}, environment={})
        if kind := options()[name].plugin_kind:
            resolve(cast(PluginKind, kind), value)
    except UsageError as error:
        raise ExpressionError(column, str(error)) from None


class _SampleSequence:
    """A value of the right type for every field of a sequence."""

    def name(self, node: Name) -> Value:
        return "text" if node.name in TEXT_FIELDS else 1

    def call(self, node: CallExpression) -> Value:
        raise not_known("function", node.name, node.column, [])

    def attribute(self, of: object, node: Attribute) -> Value:
        raise not_known("attribute", node.name, node.column, [])


class _SampleRun:
    """A value of the right type for every figure of a run."""

    def name(self, node: Name) -> Value:
        return True if node.name == BROKEN else 1

    def call(self, node: CallExpression) -> Value:
        return True if node.name == DIVERGES else 1

    def attribute(self, of: object, node: Attribute) -> Value:
        raise not_known("attribute", node.name, node.column, [])


def _latency(node: CallExpression) -> str:
    first = node.arguments[0] if node.arguments else node
    if not isinstance(first, Name) or first.name not in LATENCIES:
        raise ExpressionError(
            first.column, f"{node.name} takes one of {', '.join(LATENCIES)}, and then a filter, such as prompt <= 256"
        )
    return first.name


def _changes(node: CallExpression) -> tuple[dict[str, Any], int]:
    """The options that another engine has, and by how many ns a latency may differ."""
    changes: dict[str, Any] = {}
    by_ns = 0
    if node.arguments:
        raise ExpressionError(node.arguments[0].column, f"{DIVERGES} takes options by name, such as policy=edf")
    for keyword in node.keywords:
        given = keyword.value
        value: Value = given.name if isinstance(given, Name) else None
        if value is None and not isinstance(given, CallExpression | Attribute):
            value = value_of(given, _NO_NAMES)
        if value is None:
            raise ExpressionError(given.column, "write a word, a number or a text")
        if keyword.name == _BY:
            if isinstance(value, bool | str):
                raise ExpressionError(given.column, "write a time, such as 10ms")
            by_ns = value
        elif keyword.name not in ENGINE_OPTIONS:
            hint = did_you_mean(keyword.name, ENGINE_OPTIONS)
            raise ExpressionError(keyword.column, f"an engine has no option {keyword.name}{hint}")
        else:
            is_plugin = options()[keyword.name].plugin_kind
            changes[keyword.name] = parse_plugin_spec(str(value)) if is_plugin else value
    if not changes:
        raise ExpressionError(node.column, f"{DIVERGES} needs what differs, such as policy=edf")
    return changes, by_ns


class _NoNames:
    """For arguments that are constants."""

    def name(self, node: Name) -> Value:
        raise ExpressionError(node.column, "write a word, a number or a text")

    def call(self, node: CallExpression) -> Value:
        raise ExpressionError(node.column, "write a word, a number or a text")

    def attribute(self, of: object, node: Attribute) -> Value:
        raise ExpressionError(node.column, "write a word, a number or a text")


_NO_NAMES = _NoNames()


def _ends(observed: Observation) -> dict[tuple[int, int], int]:
    """The end-to-end time of each sequence, by the index of its request and its own."""
    if observed.outcome is None:
        return {}
    return {(observed.workload_index[each.request], each.index): each.e2e_ns for each in observed.outcome.sequences}
