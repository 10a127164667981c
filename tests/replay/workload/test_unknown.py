"""What a run does not show is drawn from what it shows of the same kind, and equal seeds draw the same."""

from __future__ import annotations

import random
from statistics import mean

from msgspec import structs

from eventlm.replay.workload.unknown import draw_unknown, has_unknown
from eventlm.replay.workload.workload import NEVER, Patience, SequenceOutput, TextEnd, Workload, WorkloadRequest
from tests.replay.made_workloads import MILLISECOND
from tests.replay.what_if_runs import requests_of


def workload_of(
    outputs: list[SequenceOutput], *, prompt: int = 100, max_tokens: int = 100, **fields: object
) -> list[WorkloadRequest]:
    """A request for each sequence_output."""
    made = requests_of(range(len(outputs)), prompt=prompt, output=max_tokens, **fields)
    return [
        structs.replace(request, outputs=[sequence_output])
        for request, sequence_output in zip(made.requests, outputs, strict=True)
    ]


def workload(*parts: list[WorkloadRequest]) -> Workload:
    return Workload(source="made", requests=[request for part in parts for request in part], block_size=16)


def ended(*lengths: int) -> list[SequenceOutput]:
    return [SequenceOutput(worker_end=length, num_tokens=length, reason="eos") for length in lengths]


def lengths_of(drawn: Workload) -> list[int]:
    return [request.outputs[0].worker_end for request in drawn.requests]


UNSEEN = SequenceOutput(seen_tokens=0)


def test_a_workload_without_unknowns_is_drawn_once_and_stays() -> None:
    known = workload(workload_of(ended(3, 5, 8)))
    assert not has_unknown(known)
    assert draw_unknown(known, seed=3) is known
    assert has_unknown(workload(workload_of([*ended(3, 5), UNSEEN])))


def test_lengths_come_from_the_same_class_and_prompt_length() -> None:
    parts = [
        workload_of([*ended(*range(1, 9)), *[UNSEEN] * 20], service_class="gold"),
        workload_of([*ended(*range(11, 19)), *[UNSEEN] * 20], service_class="bronze"),
        workload_of([*ended(*range(21, 29)), *[UNSEEN] * 20], prompt=300, service_class="gold"),
    ]
    drawn = lengths_of(draw_unknown(workload(*parts), seed=0))
    for index in range(3):
        found = drawn[index * 28 + 8 : (index + 1) * 28]
        assert set(found) <= set(range(10 * index + 1, 10 * index + 9))
        assert len(set(found)) > 2


def test_a_kind_with_few_known_lengths_takes_those_of_its_class_then_of_all() -> None:
    parts = [
        workload_of([*ended(*range(1, 9))], service_class="gold"),
        workload_of([*ended(50), *[UNSEEN] * 20], prompt=300, service_class="gold"),
        workload_of([UNSEEN] * 40, service_class="silver"),
    ]
    drawn = lengths_of(draw_unknown(workload(*parts), seed=0))
    assert set(drawn[9:29]) <= {*range(1, 9), 50}
    assert set(drawn[29:]) <= {*range(1, 9), 50}


def test_equal_seeds_draw_equal_lengths_and_others_differ() -> None:
    made = workload(workload_of([*ended(*range(1, 40)), *[UNSEEN] * 20]))
    drawn = [lengths_of(draw_unknown(made, seed=seed)) for seed in range(5)]
    assert lengths_of(draw_unknown(made, seed=2)) == drawn[2]
    assert len({tuple(each) for each in drawn}) == 5


def test_what_was_seen_of_an_answer_is_its_least_length() -> None:
    made = workload(workload_of([*ended(*range(1, 41)), *[SequenceOutput(seen_tokens=30)] * 20]))
    for seed in range(5):
        assert min(lengths_of(draw_unknown(made, seed=seed))[40:]) > 30


def test_an_answer_longer_than_all_that_ended_goes_on_to_its_limit() -> None:
    """So do all where every known answer reached its own limit."""
    made = workload(workload_of([*ended(1, 2, 3, 4, 5, 6), SequenceOutput(seen_tokens=30)]))
    assert lengths_of(draw_unknown(made, seed=0))[-1] == NEVER
    limited = workload(
        workload_of([SequenceOutput(num_tokens=100, reason="length")] * 8), workload_of([UNSEEN] * 8, max_tokens=50)
    )
    assert set(lengths_of(draw_unknown(limited, seed=0))) == {NEVER}


def test_answers_that_were_cut_short_do_not_make_the_others_look_short() -> None:
    """Half of the answers are cut after 20 tokens. The mean of those that ended is far below the true one."""
    chance = random.Random(1)
    true = [min(1 + int(chance.expovariate(1 / 40)), 400) for _ in range(600)]
    outputs = [
        SequenceOutput(seen_tokens=20) if index % 2 and length > 20 else ended(length)[0]
        for index, length in enumerate(true)
    ]
    made = workload(workload_of(outputs, max_tokens=400))
    drawn = mean(mean(lengths_of(draw_unknown(made, seed=seed))) for seed in range(5))
    naive = mean(each.worker_end for each in outputs if each.seen_tokens is None)
    assert abs(drawn - mean(true)) < 0.1 * mean(true)
    assert naive < 0.9 * mean(true)


def test_an_end_in_the_text_stays_one_where_somebody_looks_for_it() -> None:
    stop = TextEnd(position=7, reason="stop", delay_ns=MILLISECOND, s=40)
    known = workload_of([SequenceOutput(text_end=stop, num_tokens=7, reason="stop")] * 6, has_text_ends=True)
    looked, not_looked = workload_of([UNSEEN], has_text_ends=True), workload_of([UNSEEN])
    found = draw_unknown(workload(known, looked, not_looked), seed=0).requests
    assert found[6].outputs[0].text_end == structs.replace(stop, s=0)
    assert found[6].outputs[0].worker_end == NEVER
    assert (found[7].outputs[0].text_end, found[7].outputs[0].worker_end) == (None, 7)


def test_patience_is_drawn_for_clients_that_were_served_in_time() -> None:
    """Ten left after 50 ms; ten were served after 10 ms and might have left too, ten after 80 ms and would not."""
    base = workload_of(ended(*range(1, 31)))
    left = [structs.replace(each, patience=Patience(limit_ns=50, s=9), waited_ns=50) for each in base[:10]]
    early = [structs.replace(each, waited_ns=10) for each in base[10:20]]
    late = [structs.replace(each, waited_ns=80) for each in base[20:]]
    drawn = [draw_unknown(workload(left, early, late), seed=seed).requests for seed in range(5)]
    for requests in drawn:
        assert [each.patience for each in requests[:10]] == [Patience(limit_ns=50, s=9)] * 10
        assert {each.patience for each in requests[10:20]} <= {None, Patience(limit_ns=50)}
        assert {each.patience for each in requests[20:]} == {None}
    num_impatient = sum(each.patience is not None for requests in drawn for each in requests[10:20])
    assert 10 < num_impatient < 45
