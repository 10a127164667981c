"""The load of many replicas is what its options say."""

from __future__ import annotations

from benchmarks.simulated.fleet import repeated
from eventlm.events import Arrived
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams


def request(prompt_tokens: int, arrival_ns: int, parent: int = -1) -> WorkloadRequest:
    arrival = Arrived(prompt_tokens=prompt_tokens, max_tokens=4, scheduling=SchedulingParams(model=""))
    outputs = [SequenceOutput()]
    return WorkloadRequest(arrival=arrival, arrival_ns=arrival_ns, outputs=outputs, parent=parent, think_ns=9)


def test_requests_come_again_and_again_at_even_distances_and_wait_for_no_other() -> None:
    found = repeated(Workload(source="made", requests=[request(5, 0), request(7, 80, parent=0)]), 10, 0.5)
    assert [each.arrival.prompt_tokens for each in found.requests] == [5, 7, 5, 7, 5]
    assert [each.arrival_ns for each in found.requests] == [index * 100_000_000 for index in range(5)]
    assert {(each.parent, each.think_ns) for each in found.requests} == {(-1, None)}
