from __future__ import annotations

from typing import Any

import pytest

from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.evaluation import Value, evaluate
from eventlm.replay.expressions.parser import parse
from eventlm.replay.predicate.environment import OutcomeEnvironment, check_condition, figures_of
from eventlm.replay.predicate.observation import Observation, observe
from tests.replay.made_workloads import COST, make_workload

WORKLOAD = make_workload(1)
OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "num_blocks": 40}
OBSERVED = observe(WORKLOAD, OPTIONS, COST)


def _value(source: str, observed: Observation = OBSERVED) -> Value:
    expression = parse(source)
    # A condition is true or false; a figure may be a number.
    check_condition(parse(f"({source}) == ({source})"))
    return evaluate(
        expression, OutcomeEnvironment(observed, lambda changes: observe(WORKLOAD, OPTIONS | changes, COST))
    )


def test_figures_are_those_of_the_outcome() -> None:
    outcome = OBSERVED.outcome
    assert outcome is not None
    latency = outcome.latency("ttft")
    assert latency is not None
    assert _value("p99(ttft)") == latency.p99
    assert _value("mean(ttft)") == int(latency.mean)
    assert _value("preemptions") == outcome.num_preemptions > 0
    assert _value("rejected") == sum(outcome.reject_reasons.values())
    assert _value("count()") == len(outcome.sequences)
    assert _value("requests") == len(WORKLOAD.requests)
    assert _value("completed < requests * 3 and not broken and plugin_failures == 0") is True


def test_a_filter_chooses_sequences() -> None:
    outcome = OBSERVED.outcome
    assert outcome is not None
    short = [each for each in outcome.sequences if each.prompt_tokens <= 40]
    assert 0 < len(short) < len(outcome.sequences)
    assert _value("count(prompt <= 40)") == len(short)
    latency = outcome.latency("e2e", short)
    assert latency is not None
    assert _value("max(e2e, prompt <= 40)") == latency.max
    urgent = sum(each.arrival.n for each in WORKLOAD.requests if each.arrival.scheduling.priority == 1)
    assert 0 < _value("count(priority == 1)") <= urgent  # type: ignore[operator]
    assert _value("count(request == 3)") == WORKLOAD.requests[3].arrival.n
    assert _value("p50(ttft, prompt > 1M)") is None
    assert _value("p50(ttft, prompt > 1M) < 1s") is False


def test_engines_are_compared_sequence_by_sequence() -> None:
    assert _value("diverges(policy=fcfs)") is False
    assert _value("diverges(policy=lrs)") is True
    assert _value("diverges(policy=lrs, by=10min)") is False
    assert _value('diverges(policy="edf:multiplier=2", max_num_seqs=2)') is True


def test_figures_in_words() -> None:
    expression = parse("not (preemptions > 5 and p99(ttft, prompt <= 256) > 2 * 1s) or duration < -5 or broken")
    environment = OutcomeEnvironment(OBSERVED, lambda changes: observe(WORKLOAD, OPTIONS | changes, COST))
    assert OBSERVED.outcome is not None
    latency = _value("p99(ttft, prompt <= 256)")
    assert isinstance(latency, int)
    assert figures_of(expression, environment) == {
        "preemptions": f"{OBSERVED.outcome.num_preemptions:,}",
        "p99(ttft, prompt <= 256)": f"{latency / 1e9:,.9g} s",
        "duration": f"{OBSERVED.outcome.duration_ns / 1e9:,.9g} s",
        "broken": "false",
    }
    assert figures_of(parse("p99(ttft, prompt > 99k) > 1s"), environment) == {"p99(ttft, prompt > 99000)": "unknown"}


def test_a_broken_run_has_no_figures() -> None:
    broken = Observation(WORKLOAD, None, {}, broken="after event 5: a rule")
    assert _value("broken", broken) is True
    assert _value("preemptions > 0", broken) is False
    assert _value("p99(ttft) > 0", broken) is False
    assert OBSERVED.broken == ""


@pytest.mark.parametrize(
    ("source", "column", "word"),
    [
        ("preemption > 5", 1, "did you mean preemptions?"),
        ("p98(ttft) > 5s", 1, "did you mean p9"),
        ("p99(tft) > 5s", 5, "takes one of ttft"),
        ("p99() > 5s", 1, "takes one of ttft"),
        ("p99(ttft, promt < 5) > 5s", 11, "did you mean prompt?"),
        ("p99(ttft, 1 < 2, 2 < 3) > 5s", 20, "one filter"),
        ("p99(ttft, x=3) > 5s", 11, "no argument with a name"),
        ("count(p99(ttft) < 3)", 7, "calls no function"),
        ("diverges()", 1, "needs what differs"),
        ("diverges(edf)", 10, "by name"),
        ("diverges(polcy=edf)", 10, "no option polcy"),
        ("diverges(policy=edf, by=soon)", 25, "a time"),
        ("diverges(policy=p99(ttft))", 17, "a word, a number or a text"),
        ("preemptions", 1, "neither true nor false"),
        ("preemptions > 3 or p99(ttft)", 20, "neither true nor false"),
        ("count(class == 3) > 1", 13, "cannot be compared"),
        ("p99(ttft, prompt < 5 or reason) > 5s", 25, "neither true nor false"),
        ("requests > 0 or steps == 'x'", 23, "cannot be compared"),
        ("diverges(policy=nosuch)", 10, "unknown policy 'nosuch'"),
        ("diverges(policy='edf:multiplyer=2')", 10, "multiplier"),
        ("diverges(max_num_seqs=many)", 10, "an integer of at least 1"),
        ("diverges(port=80)", 10, "no option port"),
        ("req(5).skips > 3", 1, "no function req"),
        ("p99(ttft).x > 3", 11, "no attribute x"),
    ],
)
def test_what_no_run_has_is_pointed_at(source: str, column: int, word: str) -> None:
    with pytest.raises(ExpressionError) as found:
        check_condition(parse(source))
    assert found.value.column == column
    assert word in found.value.problem
    assert found.value.source == source
