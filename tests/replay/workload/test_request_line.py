from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest
from msgspec import structs

from eventlm.events import Arrived
from eventlm.replay.workload.request_line import WorkloadLine, to_line, to_request
from eventlm.replay.workload.workload import NEVER, SequenceOutput, TextEnd, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams
from tests.replay.made_workloads import make_workload

REQUEST = WorkloadRequest(
    arrival=Arrived(
        prompt_tokens=40, blocks=[8, 9], max_tokens=9, scheduling=SchedulingParams(model="m", deadline_ns=1_500_000)
    ),
    arrival_ns=123_456_700,
    outputs=[SequenceOutput(worker_end=4, num_tokens=4, reason="eos")],
)


def test_a_plain_request_is_a_short_line() -> None:
    line = to_line(REQUEST, model="m")
    assert msgspec.json.Encoder(decimal_format="number").encode(line) == (
        b'{"arrival_s":0.1234567,"prompt_tokens":40,"output_tokens":4,"max_tokens":9,"blocks":[7,8],"deadline_ms":1.5}'
    )
    assert to_request(line, model="m") == REQUEST


def test_every_field_comes_back() -> None:
    for request in make_workload(3).requests:
        assert to_request(to_line(request, model="m"), model="m") == request
    # A line takes no more than it has: fields of the structs that it does not know would be lost.
    known = set(WorkloadLine.__struct_fields__)
    of_scheduling = {"parent": "search_parent", "deadline_ns": "deadline_ms", "slo_ttft_ns": "slo_ttft_ms"}
    of_scheduling |= {"slo_tpot_ns": "slo_tpot_ms", "received_ns": "received_before_ns", "ready_ns": "ready_before_ns"}
    assert {of_scheduling.get(name, name) for name in SchedulingParams.__struct_fields__} <= known
    of_request = {"arrival_ns": "arrival_s", "think_ns": "think_s"}
    assert {of_request.get(name, name) for name in WorkloadRequest.__struct_fields__} - {"arrival"} <= known
    # A workload is of one replicaset.
    assert set(Arrived.__struct_fields__) - {"ts", "c", "p", "scheduling", "replicaset"} <= known


@pytest.mark.parametrize(
    ("outputs", "output_tokens"),
    [
        ([SequenceOutput()], 9),
        ([SequenceOutput(worker_end=3), SequenceOutput(worker_end=5)], 5),
        ([SequenceOutput(worker_end=8, text_end=TextEnd(position=6, reason="stop", delay_ns=1))], 6),
        ([SequenceOutput(text_end=TextEnd(position=0, reason="stop", delay_ns=1))], 1),
        ([SequenceOutput(seen_tokens=2)], 2),
    ],
)
def test_a_load_test_sees_the_longest_output(outputs: list[SequenceOutput], output_tokens: int) -> None:
    request = structs.replace(
        REQUEST, outputs=outputs, arrival=structs.replace(REQUEST.arrival, n=len(outputs), blocks=[])
    )
    line = to_line(request, model="m")
    assert line.output_tokens == output_tokens
    assert to_request(line, model="m") == request


def test_times_of_reception_are_flags() -> None:
    """A simulation has times of its own."""
    scheduling = SchedulingParams(model="m", received_ns=77, ready_ns=0)
    arrival = structs.replace(REQUEST.arrival, scheduling=scheduling)
    line = to_line(structs.replace(REQUEST, arrival=arrival, received_before_ns=5), model="m")
    assert (line.received_before_ns, line.ready_before_ns) == (5, None)
    found = to_request(line, model="m")
    assert (found.arrival.scheduling.received_ns, found.arrival.scheduling.ready_ns) == (1, 0)
    assert found.received_before_ns == 5


def test_an_output_without_a_length_runs_to_its_limit() -> None:
    found = to_request(WorkloadLine(arrival_s=Decimal(0), prompt_tokens=4, output_tokens=3, n=2), model="m")
    assert [output.worker_end for output in found.outputs] == [NEVER, NEVER]
    assert found.arrival.max_tokens == 3
