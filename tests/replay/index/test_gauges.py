"""Gauges against the state of a core that is driven again, and the cause of the head's wait against explanations."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.core.scheduler import waiting_head
from eventlm.events import Fact, Marker
from eventlm.events.codec import DECISION_TAGS
from eventlm.replay.explain.explainer import explain
from eventlm.replay.index.gauges import WAIT_CAUSES
from eventlm.replay.index.open import open_index


def test_gauges_are_those_of_the_state_after_each_drain(all_runs: list[Path]) -> None:
    for path in all_runs:
        index = open_index(path)
        core = index.new_core()
        drain = -1
        with LogReader(path) as reader:
            for line in reader:
                if line.tag in DECISION_TAGS:
                    continue
                event = line.event()
                assert isinstance(event, Fact | Marker)
                core.apply(event)
                if not isinstance(event, Fact) or not event.p:
                    continue
                drain += 1
                state = core.state
                assert index.drains.row(drain)["s"] == event.s
                assert index.drains.row(drain)["next_s"] == state.next_seq
                assert index.drains.row(drain)["waiting"] == state.num_waiting
                for replica in state.replicas:
                    row = index.gauges_at(drain)[replica.index]
                    assert row["running"] == len(replica.running)
                    assert row["in_flight"] == len(replica.in_flight)
                    assert row["waiting"] == len(replica.queue) + len(state.set_of(replica).shared_queue)
                    if replica.capacity is not None:
                        assert row["cached"] == row["free"] == row["held"] == row["partial"] == -1
                    else:
                        assert row["partial"] == len(replica.partials())
                        assert row["cached"] == replica.pool.num_idle
                        assert row["free"] + row["cached"] == replica.pool.num_available
                        assert row["held"] + row["free"] + row["cached"] == replica.pool.num_blocks
                    head = waiting_head(state, replica)
                    found = (row["head_request"], row["head_index"]) if row["head_cause"] >= 0 else None
                    assert found == (None if head is None else tuple(head.sequence.id))
        assert drain == len(index.drains) - 1


def test_the_heads_cause_is_that_of_its_explanation(all_runs: list[Path]) -> None:
    causes = set()
    for path in all_runs:
        index = open_index(path)
        requests = sorted(set(index.requests["request"].tolist()))
        explained = {
            (each.request, each.index): each for each in explain(path, [(r, None) for r in requests]).explanations
        }
        ends = [*index.drains["ts"].tolist()[1:], index.facts.last_ns]
        for drain, (ts, end_ns) in enumerate(zip(index.drains["ts"].tolist(), ends, strict=True)):
            for row in index.gauges_at(drain).values():
                if row["head_cause"] < 0 or ts == end_ns:
                    continue
                explanation = explained[row["head_request"], row["head_index"]]
                at = [each for each in explanation.intervals if each.start_ns <= ts < each.end_ns]
                assert at, (path, drain)
                cause = WAIT_CAUSES[row["head_cause"]]
                assert cause == at[0].cause, (path, drain, index.drains.row(drain), row, at[0])
                causes.add(cause)
    assert causes >= {"blocks", "sequence_limit", "token_budget", "steps_in_flight", "backend_limit"}
