"""The sentences of an explanation: what they say of requests whose life is known."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from eventlm.core.state.step_plan import WaitCause
from eventlm.replay.explain.result import Doing, Explanation, Interval, Order, Phase, Preemption, StepShare
from eventlm.replay.explain.story import (
    by_key,
    describe,
    largest_part,
    part_rows,
    to_object,
)
from eventlm.replay.explain.words import CAUSES, PHASES, milliseconds
from eventlm.types import SequenceId

MILLISECOND = 1_000_000


def ids(*requests: int) -> list[SequenceId]:
    return [SequenceId(request, 0) for request in requests]


def timeline(*spans: tuple[Any, ...]) -> list[Interval]:
    """(ms, phase, cause, further fields) one behind the other."""
    intervals, now_ns = [], 0
    for ms, phase, cause, *fields in spans:
        end_ns = now_ns + int(ms * MILLISECOND)
        intervals.append(
            Interval(start_ns=now_ns, end_ns=end_ns, phase=phase, cause=cause, **(fields[0] if fields else {}))
        )
        now_ns = end_ns
    return intervals


def step(number: int, num_tokens: int = 0, **fields: int) -> StepShare:
    times = dict.fromkeys(("launched_ns", "start_ns", "end_ns", "completed_ns"), 0)
    others: dict[str, int] = {"position": 0, "num_produced": 1, "num_decodes": 0, "num_chunk_tokens": 0, "residency": 1}
    return StepShare(replica=0, step=number, num_tokens=num_tokens, **(times | others | fields))


def made(intervals: list[Interval], **fields: Any) -> Explanation:
    known: dict[str, Any] = {
        "request": 1043,
        "index": 0,
        "n": 1,
        "kind": "generate",
        "policy": "fcfs",
        "num_replicas": 1,
        "prompt_tokens": 512,
        "output_tokens": 64,
        "cached_tokens": 0,
        "outcome": "length",
        "start_ns": 0,
        "arrived_ns": 0,
        "deadline_ns": 0,
        "first_token_ns": None,
        "end_ns": intervals[-1].end_ns,
    }
    return Explanation(intervals=intervals, **(known | fields))


def test_the_story_of_a_request_that_waited_behind_others() -> None:
    held = {"replica": 0, "limit": 8, "held_by": ids(1001, 1002, 1003, 1004), "admitted": ids(1010, 1011)}
    order = Order(policy="fcfs", other=SequenceId(1010, 0), other_urgency=(0, 0), own_urgency=(0, 12 * MILLISECOND))
    intervals = timeline(
        (1.5, "edge", "tokenizing"),
        (0.6, "edge", "stamping"),
        (900, "queue", "sequence_limit", held | {"order": order}),
        (300.1, "queue", "blocks", {"replica": 0, "limit": 64, "num_lacking": 3, "held_by": ids(1001)}),
        (60, "prefill", "step", {"replica": 0, "steps": [811]}),
        (20.1, "prefill", "other_step", {"replica": 0, "steps": [812]}),
        (5, "prefill", "step", {"replica": 0, "steps": [813]}),
        (85, "decode", "step", {"replica": 0, "steps": [814]}),
        (10, "decode", "step", {"replica": 0, "steps": [815]}),
        (1, "decode", "dispatch", {"replica": 0}),
        (3.2, "text_end", "text_end"),
    )
    steps = [
        step(811, 448, num_decodes=7),
        step(813, 64, num_decodes=1, num_chunk_tokens=1),
        step(814, num_chunk_tokens=1024),
        step(815),
    ]
    found = made(intervals, steps=steps, first_token_ns=1287 * MILLISECOND + 300_000, arrived_ns=2_100_000)
    assert describe(found) == [
        "Request 1043 (512 prompt tokens, 64 output tokens, fcfs) took 1,386.5 ms and ended with `length`; its first "
        "token came after 1,287.3 ms.",
        "It reached the scheduler after 2.10 ms: 1.50 ms until its prompt was tokenized and 0.600 ms from there until "
        "the engine took it in.",
        "It waited 1,200.1 ms to be admitted: 900.0 ms behind requests 1001, 1002, 1003 and 3 others that had arrived "
        "before it (the sequence limit of 8 was reached); 300.1 ms for want of up to 3 blocks, behind request 1001 "
        "that had arrived before it (the pool has 64). Request 1010 was ahead of it: it arrived 12.0 ms earlier.",
        "Its prompt took 85.1 ms in 2 steps (step 811: 448 tokens beside 7 decodes; step 813: 64 tokens beside 1 "
        "decode and 1 prompt token of others): 65.0 ms computing; 20.1 ms at the worker, behind earlier steps without "
        "it.",
        "Decoding took 96.0 ms in 2 steps, of which 85.0 ms in 1 that also had prompt chunks of others (the longest: "
        "step 814, 85.0 ms, 1,024 tokens): 95.0 ms computing; 1.00 ms from launches to the start of its steps.",
        "Then 3.20 ms passed until the server had looked for the end of its text.",
    ]
    assert largest_part(found) == "65% waiting: sequence limit, behind requests 1001, 1002, 1003 and 3 others"
    assert largest_part(found, from_ns=found.first_token_ns).endswith("% decoding: computing")
    blocked = made(timeline((1, "queue", "head_of_line", {"other": SequenceId(7, 0)})))
    assert largest_part(blocked) == "100% waiting: head of the line, behind request 7"
    rows = list(part_rows(found))
    assert rows[0] == ["waiting: sequence limit", "900.000000", "64.9%"]
    assert rows[-1] == ["total", "1,386.500000", "100.0%"]
    told = to_object(found)
    assert told["story"] == describe(found)
    assert sum(part["duration_ns"] for part in told["parts"]) == told["total_ns"] == found.end_ns


def test_the_story_of_preemptions() -> None:
    intervals = timeline(
        (5, "prefill", "step", {"replica": 0, "steps": [1]}),
        (2, "preempted", "draining", {"replica": 0}),
        (8, "preempted", "worker"),
        (4, "recompute", "step", {"replica": 0, "steps": [4]}),
    )
    order = Order(policy="edf", other=SequenceId(7, 0), other_urgency=(0, 10), own_urgency=(0, 3_000_010))
    preemptions = [
        Preemption(at_ns=5 * MILLISECOND, replica=0, reason="memory", num_tokens=9, by=SequenceId(7, 0), order=order),
        Preemption(at_ns=6 * MILLISECOND, replica=0, reason="lost", num_tokens=9),
        Preemption(at_ns=6 * MILLISECOND, replica=0, reason="memory", num_tokens=9),
        Preemption(at_ns=7 * MILLISECOND, replica=0, reason="admission", num_tokens=9, by=SequenceId(8, 0)),
    ]
    steps = [step(1, 8), step(4, 9, residency=2)]
    found = made(
        intervals,
        preemptions=preemptions,
        steps=steps,
        n=2,
        index=1,
        policy="edf",
        outcome="unfinished",
        cached_tokens=4,
    )
    assert describe(found) == [
        "Sample 1043.1 of request 1043's 2 (512 prompt tokens, 4 of them cached, 64 output tokens, edf) had not ended "
        "when the log does, after 19.0 ms.",
        "Its prompt took 5.00 ms in 1 step (step 1: 8 tokens).",
        "It was preempted 4 times: after 5.00 ms request 7 needed a block (its deadline was 3.00 ms earlier); after "
        "6.00 ms its worker was lost; after 6.00 ms it needed a block and no less urgent sequence had one; and 1 more "
        "time. "
        "It waited 10.0 ms to be admitted again: 8.00 ms until a worker came up; 2.00 ms until the steps that it was "
        "still in had completed.",
        "Computing 9 tokens again took 4.00 ms in 1 step (step 4: 9 tokens).",
    ]


def test_a_rejected_one_and_one_that_is_partly_in_the_log() -> None:
    rejected = made(timeline((1, "edge", "receiving")), outcome="rejected: queue_full", notes=["5 waited"])
    assert describe(rejected)[0].endswith("was rejected: queue_full, 1.00 ms after its reception.")
    assert describe(rejected)[1:] == ["Note: 5 waited."]
    later = made(timeline((3, "unseen", "not_recorded"), (1, "queue", "paused")), outcome="unknown", kind="score")
    opening, unseen, waited = describe(later)
    assert opening == (
        "Request 1043 (512 prompt tokens, score, fcfs) ended where nothing was recorded, and was last seen after "
        "4.00 ms."
    )
    assert unseen == "3.00 ms of it are not in the log."
    assert waited == "It waited 1.00 ms to be admitted, while the engine was paused."


@pytest.mark.parametrize(
    ("policy", "other", "own", "words"),
    [
        ("fcfs", (-1, 5), (0, 1), "its priority was -1 against 0, and lower goes first"),
        ("fcfs", (0, 5), (0, 1_000_005), "it arrived 1.00 ms earlier"),
        ("fcfs", (0, 5), (0, 5), "under fcfs both are equal, and it came first"),
        ("edf", (0, 5), (0, 250_000_005), "its deadline was 250.0 ms earlier"),
        ("lrs", (0, 1 << 18), (0, 1 << 19), "its slack was 0.25 of its deadline against 0.50, and smaller goes first"),
        (
            "lrs",
            (0, 900_000),
            (0, 900_900),
            "its slack was 0.858 of its deadline against 0.859, and smaller goes first",
        ),
        ("lpm", (0, -40), (0, 24), "with the wait counted in, it had 64 tokens more cached"),
        ("mine:Own", (0, -4), (0, 1000), "its key under mine:Own was -4 against 1,000, and smaller goes first"),
    ],
)
def test_keys_are_described_in_the_terms_of_their_policy(
    policy: str, other: tuple[int, int], own: tuple[int, int], words: str
) -> None:
    order = Order(policy=policy, other=SequenceId(1, 0), other_urgency=other, own_urgency=own)
    assert by_key(order) == words


def test_other_reasons_in_words() -> None:
    def waited(cause: str, **fields: Any) -> str:
        return describe(made(timeline((1, "queue", cause, fields))))[1]

    assert waited("token_budget", steps=[3, 4, 5], limit=64, held_by=ids(7)) == (
        "It waited 1.00 ms to be admitted, because the token budget of 64 went to more urgent rows in steps 3 to 5, "
        "among them prompts of request 7 that had arrived before it."
    )
    assert "rows in 2 steps from 3 to 9." in waited("token_budget", steps=[3, 9], limit=64)
    assert "until a step had completed (2 of at most 2 were in flight)." in waited(
        "steps_in_flight", steps=[3, 4], limit=2
    )
    assert "behind request 7, which was more urgent, did not fit" in waited("head_of_line", other=SequenceId(7, 0))
    assert "while request 7 was tried alone" in waited("trial", other=SequenceId(7, 0))
    assert "until it could be tried alone" in waited("trial", other=SequenceId(1043, 0))
    assert "behind requests 7 and 2000, 1 of them a later arrival (the" in waited(
        "sequence_limit", held_by=ids(7, 2000)
    )
    assert "behind request 2000 that arrived after it (the" in waited("sequence_limit", held_by=ids(2000))
    own_sample = waited("sequence_limit", limit=1, held_by=[SequenceId(1043, 1)])
    assert "behind another sample of its own (the sequence limit of 1 was reached)" in own_sample


def test_steps_are_reported_with_their_replica_where_there_are_several() -> None:
    intervals = timeline(
        (1, "queue", "token_budget", {"replica": 1, "steps": [3], "limit": 8}),
        (2, "prefill", "step", {"replica": 0, "steps": [4]}),
        (5, "decode", "step", {"replica": 0, "steps": [5]}),
    )
    found = made(intervals, steps=[step(4, 9), step(5)], num_replicas=2)
    waited, prompt, decoded = describe(found)[1:]
    limited = {"limit": 4, "held_by": ids(7)}
    (_, full) = describe(made(timeline((1, "queue", "sequence_limit", limited)), num_replicas=2))
    assert full.endswith("(the sequence limit of 4 a replica was reached).")
    assert waited.endswith("went to more urgent rows in step 3 of replica 1.")
    assert prompt == "Its prompt took 2.00 ms in 1 step of replica 0 (step 4: 9 tokens)."
    assert decoded == "Decoding took 5.00 ms in 1 step of replica 0."


def test_steps_of_a_pipeline_count_once_however_many_stages_they_have() -> None:
    where = [{"replica": 0, "steps": [number]} for number in (4, 5)]
    stages = [(2, "step"), (1, "stage_wait"), (0.5, "exchange"), (3, "step")]
    found = made(
        timeline(*((ms, "decode", cause, each) for each in where for ms, cause in stages)),
        steps=[step(4, num_chunk_tokens=9), step(5)],
    )
    assert describe(found)[1] == (
        "Decoding took 13.0 ms in 2 steps, of which 6.50 ms in 1 that also had prompt chunks of others (the longest: "
        "step 4, 6.50 ms, 9 tokens): 10.0 ms computing; 2.00 ms waiting for stages that computed other steps; 1.00 ms "
        "on the way from stage to stage."
    )
    assert list(part_rows(found)) == [
        ["decoding: computing", "10.000000", "76.9%"],
        ["decoding: waiting for a stage", "2.000000", "15.4%"],
        ["decoding: exchange", "1.000000", "7.7%"],
        ["total", "13.000000", "100.0%"],
    ]


@pytest.mark.parametrize(
    ("first_token_ms", "words"),
    [(30, "came 13.0 ms before that."), (52, "came 9.00 ms after that."), (None, "never came.")],
)
def test_a_deadline_is_reported_as_met_or_missed(first_token_ms: int | None, words: str) -> None:
    first_token_ns = None if first_token_ms is None else first_token_ms * MILLISECOND
    times = {"arrived_ns": 3 * MILLISECOND, "deadline_ns": 40 * MILLISECOND, "first_token_ns": first_token_ns}
    opening = describe(made(timeline((90, "decode", "step", {"steps": [1]})), **times))[0]
    assert opening.endswith(f" Its first token was due 40.0 ms after its arrival and {words}")


def test_of_those_ahead_a_later_arrival_is_named_first() -> None:
    def behind(other: int) -> dict[str, Any]:
        order = Order(policy="fcfs", other=SequenceId(other, 0), other_urgency=(0, 0), own_urgency=(1, 0))
        return {"limit": 1, "held_by": ids(other), "order": order}

    earlier, later = behind(7), behind(2000)
    found = made(timeline((9, "queue", "sequence_limit", earlier), (1, "queue", "sequence_limit", later)))
    assert describe(found)[1].endswith(
        "Request 2000 was ahead of it: its priority was 0 against 1, and lower goes first."
    )


def test_everything_has_a_name_and_words() -> None:
    causes = [*get_args(WaitCause), *get_args(Doing)]
    assert sorted(CAUSES) == sorted(causes)
    assert sorted(PHASES) == sorted(get_args(Phase))
    assert len(set(CAUSES.values())) == len(causes)
    told_elsewhere = ("step", "receiving", "tokenizing", "stamping", "text_end", "not_recorded")
    fields = {"steps": [1], "other": SequenceId(5, 0), "held_by": ids(5)}
    for cause in [cause for cause in causes if cause not in told_elsewhere]:
        both = timeline((1, "prefill", cause, fields), (2, "prefill", "step", {"steps": [2]}))
        assert " ms " in describe(made(both))[1].split(":", 1)[1]


def test_durations_to_three_digits() -> None:
    shown = [milliseconds(ns) for ns in (42_000, 999_600, 2_130_000, 9_996_000, 1_942_300_000)]
    assert shown == ["0.042 ms", "1.00 ms", "2.13 ms", "10.0 ms", "1,942.3 ms"]
