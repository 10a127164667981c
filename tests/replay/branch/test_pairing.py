"""Sequences of a branch are found beside those of the run, whatever their positions there."""

from __future__ import annotations

from msgspec import structs

from eventlm.replay.branch.pairing import pair_requests
from eventlm.replay.outcome import RunOutcome, SequenceOutcome
from eventlm.replay.what_if.compare import Ran
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from tests.made_requests import make_arrival

EMPTY = RunOutcome(
    sequences=[],
    rejections=[],
    num_requests=0,
    num_unfinished=0,
    reject_reasons={},
    duration_ns=0,
    num_steps=0,
    busy_ns=0,
    output_tokens=0,
    num_preemptions=0,
    hit_tokens=0,
    queried_tokens=0,
)


def ended(request: int, index: int = 0, *, e2e_ns: int = 100, reason: str = "length") -> SequenceOutcome:
    return SequenceOutcome(
        request=request,
        index=index,
        reason=reason,
        service_class="",
        prompt_tokens=5,
        output_tokens=3,
        cached_tokens=0,
        arrived_ns=0,
        ended_ns=e2e_ns,
        e2e_ns=e2e_ns,
        ttft_ns=10,
        tpot_ns=None,
        queue_ns=None,
        num_preemptions=1,
        met_deadline=None,
        met_objectives=None,
        tokens_in_time=None,
    )


def work_of(*seqs: int) -> Workload:
    arrival = make_arrival(prompt_tokens=5, max_tokens=3)
    requests = [WorkloadRequest(arrival=arrival, arrival_ns=s, outputs=[SequenceOutput()], s=s) for s in seqs]
    return Workload(source="made", requests=requests)


def test_a_request_that_arrives_later_has_another_number_in_the_branch() -> None:
    recorded = Ran(structs.replace(EMPTY, sequences=[ended(40), ended(3)]), {3: 0, 40: 1}, 0)
    branched = Ran(structs.replace(EMPTY, sequences=[ended(3, e2e_ns=130), ended(52, e2e_ns=60)]), {3: 0, 52: 1}, 0)
    found = pair_requests(work_of(3, 40), recorded, branched)
    assert [(pair.request, pair.branch_request, pair.e2e_difference_ns) for pair in found] == [
        (3, 3, 30),
        (40, 52, -40),
    ]
    assert found[0].branch is not None
    assert (found[0].branch.ttft_ns, found[0].branch.num_preemptions, found[0].prompt_tokens) == (10, 1, 5)


def test_what_ended_in_one_run_only_or_was_cut_short_has_no_difference() -> None:
    recorded = Ran(structs.replace(EMPTY, sequences=[ended(3), ended(3, 1), ended(9)]), {3: 0, 9: 1}, 0)
    branched = Ran(
        structs.replace(EMPTY, sequences=[ended(3), ended(20), ended(9, reason="cancelled")]), {3: 0, 9: 1, 20: 2}, 0
    )
    found = pair_requests(work_of(3, 9, 15), recorded, branched)
    assert [(pair.request, pair.index, pair.e2e_difference_ns) for pair in found] == [
        (3, 0, 0),
        (3, 1, None),
        (9, 0, None),
        (15, 0, None),
    ]
    assert (found[1].branch, found[1].branch_request, found[3].recorded) == (None, None, None)
