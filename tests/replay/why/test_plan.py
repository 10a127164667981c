"""What a drain planned, turn by turn."""

from __future__ import annotations

import json

from eventlm.core.state.plan_witness import CandidateSeen, VictimSeen
from eventlm.events import Paused
from eventlm.replay.why.plan import describe_plan, find_turns, plan_object
from tests.core.rig import arrival
from tests.replay.why.watched import WatchedRig


def described(rig: WatchedRig) -> list[str]:
    return list(describe_plan(rig.state, find_turns(rig.state, rig.witness)))


def test_a_turn_for_each_step_and_one_that_finds_nothing_more() -> None:
    rig = WatchedRig(num_replicas=2, max_steps_in_flight=2)
    rig.arrive_all(arrival(), arrival())
    turns = find_turns(rig.state, rig.witness)
    assert [(turn.taken.replica, turn.ended.step) for turn in turns[:2]] == [(0, 0), (1, -1)]
    assert turns[0].ended.num_chunks == 2
    assert [each.verdict for each in turns[0].of(CandidateSeen)] == ["admitted", "admitted"]


def test_what_was_looked_at_and_why_it_ended() -> None:
    rig = WatchedRig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64, max_skips=0)
    first, second, _ = rig.arrive_all(arrival(32, 4), arrival(20, 4), arrival(4, 4))
    lines = described(rig)
    assert lines[0] == "replica 0 at 0.002000 s launched step 0: 0 decodes and 1 chunk, 32 of at most 64 tokens"
    assert lines[1] == "before it: 0 residents, 12 blocks available, 0 steps in flight"
    rows = {line.split()[0]: line for line in lines[3:5]}
    assert "admitted" in rows[f"{first}"]
    assert rows[f"{first}"].endswith("32 of 32")
    assert "passed over: blocks" in rows[f"{second}"]
    assert f"without a row (blocks): {second}" in lines
    assert lines[-1] == f"nobody further was looked at: head of the line, {second}"


def test_evictions_and_short_decodes() -> None:
    rig = WatchedRig(num_blocks=8, max_model_len=28)
    rig.arrive(8, 8)
    second = rig.arrive(12, 8)
    rig.complete()
    urgent = rig.arrive(14, 2, priority=-1)
    rig.complete()
    (turn,) = find_turns(rig.state, rig.witness)
    assert [each.sequence.request for each in turn.of(VictimSeen)] == [second]
    assert any(line.startswith(f"the head of the line, {urgent}, lacked") for line in described(rig))
    tight = WatchedRig(num_blocks=6, max_model_len=20)
    first, *_ = tight.arrive_all(*(arrival(4, 12) for _ in range(3)))
    for _ in range(5):
        tight.complete()
    assert f"decode {first} wanted 1 block and 0 were available: it got one" in described(tight)


def test_nothing_was_planned() -> None:
    rig = WatchedRig()
    rig.arrive(4, 20)
    rig.arrive()
    assert described(rig) == ["nothing was planned at 0.003000 s: no replica with a worker had room for a step"]
    rig.feed(Paused())
    assert "the engine is paused" in described(rig)[0]


def test_the_object_names_everything() -> None:
    rig = WatchedRig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64)
    _, second = rig.arrive_all(arrival(32, 4), arrival(20, 4))
    found = json.loads(json.dumps(plan_object(rig.state, find_turns(rig.state, rig.witness))))
    (turn,) = found["turns"]
    assert (turn["replica"], turn["step"], turn["num_running"]) == (0, 0, 0)
    assert turn["candidates"][1]["verdict"] == "blocks"
    assert turn["candidates"][1]["num_lacking"] == 3
    assert turn["chunks"][0]["num_tokens"] == 32
    assert turn["left_out"] == [
        {"sequence": [second, 0], "cause": "blocks", "replica": 0, "num_lacking": 3, "other": None}
    ]
    assert found["lines"]
