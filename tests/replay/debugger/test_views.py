"""Tables of the state say what the state has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.core.state.sequence import State
from eventlm.errors import UsageError
from eventlm.replay.debugger import views
from eventlm.replay.debugger.results import TableResult
from eventlm.replay.debugger.session import Session
from eventlm.replay.explain.words import CAUSES
from tests.replay.golden import FOLDER
from tests.replay.replicaset_runs import made_sets

POSITIONS = (10, 64, 100, 103, 122, 146, 182)


def rows_of(table: TableResult) -> list[dict[str, object]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


@pytest.mark.parametrize("s", POSITIONS)
def test_tables_add_up(session: Session, s: int) -> None:
    session.execute(f"goto {s}")
    state = session.core.state
    replica = state.replicas[0]
    waiting = rows_of(views.queue(state, ""))
    assert len([row for row in waiting if row["place"] is not None]) == sum(
        len(queue) for queue in state.replicasets[0].queues
    )
    assert len(waiting) == state.num_waiting
    assert [row["request"] for row in rows_of(views.running(state, ""))] == [
        views.name_of(each) for each in replica.running
    ]
    pool = rows_of(views.pool(state, ""))[0]
    assert pool["free"] + pool["cached"] + pool["held"] == pool["blocks"] == 10  # type: ignore[operator]
    trees = rows_of(views.tree(state, ""))
    assert sum(row["blocks"] for row in trees) == len(replica.pool.tree)  # type: ignore[misc]
    steps = rows_of(views.steps(state, ""))
    assert [row["step"] for row in steps] == [step.step for step in replica.in_flight]
    assert len(views.timers(state, "").rows) == len([timer for timer in state.timers if timer[1] in state.requests])


@pytest.mark.parametrize("name", ["fcfs_one_replica", "edf_tight"])
def test_who_is_not_in_the_line_is_there_for_the_reason_that_why_gives(name: str, cache: None) -> None:
    reasons = Counter[str]()
    with Session.open(FOLDER / f"{name}.jsonl") as session:
        for s in range(session.events.first_s, session.events.last_s, 3):
            session.move_to(s)
            state = session.core.state
            for row in rows_of(views.queue(state, "")):
                if row["place"] is not None:
                    continue
                reason = str(row["not in line"])
                reasons[reason] += 1
                if not state.drain_open:
                    cause = session.execute(f"why {row['request']}").to_object()["report"]["cause"]
                    assert reason == CAUSES[cause], (s, row)
                elif reason != "not planned yet":
                    request, _, sample = str(row["request"]).partition(".")
                    sequence = state.requests[int(request)].sequences[int(sample or 0)]
                    assert sequence.in_flight or sequence.state is State.WAITING_FOR_GRAMMAR, (s, row)
    assert reasons


def test_the_line_is_in_its_order(session: Session) -> None:
    session.execute("find waiting > 1")
    waiting = [row for row in rows_of(views.queue(session.core.state, "")) if row["place"] is not None]
    assert len(waiting) > 1
    keys = [(row["priority"], row["key"]) for row in waiting]
    assert keys == sorted(keys)
    assert waiting[0]["request"] == str(session.gauges.values(["head_request"], 0, session.position)["head_request"])


def test_a_sequence_and_a_replica(session: Session) -> None:
    session.execute("goto 122")
    state = session.core.state
    sequence = state.requests[92].sequences[2]
    found = {row[0]: row[1] for row in views.sequence(state, sequence, "").rows}
    assert found["prompt tokens"] == sequence.prompt_tokens
    assert found["rows in flight"] == sequence.in_flight
    assert ["next step", state.replicas[0].next_step] in views.replica(state, 0, "").rows
    with pytest.raises(UsageError, match="there is no replica 1; the run has 1 replica"):
        views.replica(state, 1, "")


def test_the_configuration(session: Session) -> None:
    rows = views.config(session.index.header).rows
    assert ["num_blocks", 10] in rows
    assert any(row[0] == "policy" and str(row[1]).startswith("edf") for row in rows)


def test_the_configuration_of_several_replicasets(tmp_path: Path) -> None:
    with LogReader(made_sets(tmp_path, num_requests=4)) as reader:
        found = views.config(reader.header)
    assert found.columns == ["replicaset", "option", "value"]
    assert [row for row in found.rows if row[1] == "block_size"] == [
        ["main", "block_size", 16],
        ["small", "block_size", 8],
    ]
    assert ["small", "policy", "lrs"] in [[*row[:2], str(row[2]).partition(" ")[0]] for row in found.rows]


def test_what_differs(session: Session) -> None:
    session.execute("goto 91")
    before = views.summary(session.core.state)
    session.execute("goto 110")
    after = views.summary(session.core.state)
    assert views.difference(after, after, "same").rows == []
    found = {row[0]: row[1:] for row in views.difference(before, after, "from 91").rows}
    assert found["request 103"] == ["not there", "decode"]
    assert found["replica 0 next step"] == [f"{before['replica 0 next step']}", "25"]
    # Of one that came, or ended, nothing more is said.
    assert not any(str(name).startswith("request 103 ") for name in found)
    back = {row[0]: row[1:] for row in views.difference(after, before, "back").rows}
    assert back["request 103"] == ["decode", "ended"]
