from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.replay.shrink.features import FEATURES, output_tokens, with_output, with_prompt
from eventlm.replay.workload.file import decode_workload, encode_workload
from eventlm.replay.workload.recorded_run import read_run
from eventlm.replay.workload.workload import SequenceOutput
from tests.replay.golden import FOLDER
from tests.replay.made_workloads import make_workload

REQUESTS = [
    *make_workload(3).requests,
    *read_run(FOLDER / "edf_tight.jsonl").workload.requests,
    *read_run(FOLDER / "fcfs_one_replica.jsonl").workload.requests,
]


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_is_lost_once(name: str) -> None:
    simplify = FEATURES[name]
    for request in REQUESTS:
        assert simplify(simplify(request)) == simplify(request)


def test_without_all_of_them_a_request_is_a_short_line() -> None:
    workload = make_workload(3)
    plain = []
    for request in workload.requests:
        for simplify in FEATURES.values():
            request = simplify(request)
        plain.append(request)
    found = structs.replace(workload, requests=plain)
    assert decode_workload(encode_workload(found), "w") == found
    lines = encode_workload(found).decode().splitlines()[1:]
    assert all(len(line.split(",")) == 3 for line in lines)


def test_a_prompt_is_cut() -> None:
    request = next(each for each in REQUESTS if len(each.arrival.blocks) > 3)
    cut = with_prompt(request, 33, block_size=16)
    assert cut.arrival.prompt_tokens == 33
    assert cut.arrival.blocks == request.arrival.blocks[:3]
    assert with_prompt(request, 33, block_size=0).arrival.blocks == []


def test_an_output_is_cut_and_ends_as_it_did() -> None:
    by_limit = structs.replace(REQUESTS[0], outputs=[SequenceOutput(num_tokens=9)])
    by_limit = structs.replace(by_limit, arrival=structs.replace(by_limit.arrival, n=1, max_tokens=9))
    cut = with_output(by_limit, 4)
    assert (output_tokens(cut), cut.arrival.max_tokens) == (4, 4)
    by_model = structs.replace(by_limit, outputs=[SequenceOutput(worker_end=7)])
    cut = with_output(by_model, 4)
    assert (output_tokens(cut), cut.arrival.max_tokens, cut.outputs[0].worker_end) == (4, 9, 4)
