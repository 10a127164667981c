"""Lines and JSON of an answer."""

from __future__ import annotations

import json

from eventlm.replay.why.describe import describe_next_step, describe_why, to_object
from eventlm.replay.why.next_step import Departure, NextStep
from eventlm.types import SequenceId
from tests.core.rig import MILLISECOND, arrival
from tests.replay.why.watched import WatchedRig


def lacking_blocks() -> tuple[WatchedRig, int]:
    rig = WatchedRig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64)
    _, second = rig.arrive_all(arrival(32, 4), arrival(20, 4))
    return rig, second


def test_verdict_constraints_place_and_holders() -> None:
    rig, second = lacking_blocks()
    lines = list(describe_why(rig.ask(second)))
    assert lines[0].startswith(f"request {second} at 0.002000 s")
    assert "Blocks (replica 0): it needs 6 beside 0 cached ones; 3 available." in lines[1]
    (decisive,) = [line for line in lines if "<=" in line]
    assert decisive.split()[:6] == ["blocks", "0", "6", "3", "STOPS", "<="]
    # The first is resident: nobody is ahead in the line.
    (place,) = [line for line in lines if line.startswith("place ")]
    assert place.startswith("place 1 of 1 in the line of replica 0, by first: priority 0, key 2,000,000")
    assert any("12 blocks: 3 free, 0 cached and held by none, 9 held by 1 sequence" in line for line in lines)


def test_who_is_ahead_and_why() -> None:
    rig = WatchedRig(max_num_seqs=1)
    rig.arrive(4, 8, priority=-2)
    one = rig.arrive(priority=-1)
    two = rig.arrive()
    rig.complete()
    lines = list(describe_why(rig.ask(two)))
    assert f"next ahead: request {one}: its priority was -1 against 0, and lower goes first" in lines


def test_one_in_a_step_is_said_to_be() -> None:
    rig = WatchedRig()
    request = rig.arrive(6, 20)
    found = rig.ask(request)
    lines = list(describe_why(found))
    assert "It is in step 0 of replica 0." in lines
    (budget,) = [each for each in found.constraints if each.name == "token_budget"]
    assert (budget.verdict, budget.value) == ("met", None)
    assert any(line.startswith("token budget") and "it was in the plan of its latest step" in line for line in lines)


def test_a_budget_that_is_used_up_and_did_not_decide() -> None:
    rig = WatchedRig(max_num_seqs=1, max_num_batched_tokens=32)
    _, second = rig.arrive_all(arrival(32, 4), arrival(20, 4))
    (line,) = [line for line in describe_why(rig.ask(second)) if line.startswith("token budget")]
    assert line.split()[2:6] == ["0", "32", "32", "ok"]
    assert line.endswith("; used up, but not what decided")


def test_the_object_has_all_fields_and_the_lines() -> None:
    rig, second = lacking_blocks()
    found = json.loads(json.dumps(to_object(rig.ask(second))))
    assert (found["cause"], found["num_lacking"], found["place"]["place"]) == ("blocks", 3, 1)
    assert {"name", "verdict", "replica", "value", "limit", "detail", "decides"} == set(found["constraints"][0])
    assert found["lines"][0].startswith("request")


def test_the_next_step_in_words() -> None:
    found = NextStep(
        request=7, index=0, s=40, ts=5 * MILLISECOND, replica=1, step=9, num_tokens=16,
        fact_s=37, fact="done", first_s=37,
        departures=[Departure(sequence=SequenceId(3, 1), how="ended: length", num_blocks=4)],
    )  # fmt: skip
    assert describe_next_step(found, 2 * MILLISECOND) == (
        "Next it was in step 9 of replica 1 3.00 ms later, at event 40, with a chunk of 16 tokens, planned on event 37 "
        "(`done`); before that left: 3.1 ended: length (4 blocks)."
    )
    ended = NextStep(request=7, index=0, s=40, ts=0, ended="cancelled", fact_s=39, fact="cancel", first_s=39)
    assert "it ended with `cancelled`" in describe_next_step(ended, 0)
    assert describe_next_step(None, 0) == "It is in no later step of the log."
