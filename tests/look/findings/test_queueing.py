"""Saturation, rejections and a head of the line that does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec import structs

from eventlm.events import Arrived
from eventlm.look.findings.find import find_all
from eventlm.look.findings.queueing import _inversions
from eventlm.replay.debugger.session import Session
from eventlm.replay.index.open import open_index
from eventlm.replay.workload.workload import SequenceOutput, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams
from tests.look.planted import make_load, record_load


def test_overtaking_is_counted() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        values = draw.integers(0, 10, 30)
        expected = [sum(later < value for later in values[place + 1 :]) for place, value in enumerate(values)]
        assert _inversions(values).tolist() == expected


def test_too_much_load_is_saturation_and_rejections(tmp_path: Path) -> None:
    run = record_load(tmp_path, make_load(1, rate=80), {"max_num_seqs": 4, "max_queue_len": 40})
    found = {finding.kind: finding for finding in find_all(open_index(run))}
    assert found.keys() == {"saturation", "rejections"}
    assert found["saturation"].culprit == "max_num_seqs 4"
    assert found["rejections"].culprit == "max_queue_len 40"
    assert found["rejections"].figures["num_rejected"] > 10
    assert "mostly waits for a slot (max_num_seqs 4)" in found["saturation"].text
    (unverified, _) = find_all(open_index(run, verify=False))
    assert unverified.culprit == "load"
    assert unverified.text.endswith("is known of verified runs only.")


def test_a_large_prompt_at_the_head_of_the_line(tmp_path: Path) -> None:
    """It needs nearly all blocks, and nobody may pass it."""
    workload = make_load(3, rate=30, num_requests=300)
    middle = workload.requests[150].arrival_ns
    large = WorkloadRequest(
        arrival=Arrived(prompt_tokens=980, max_tokens=20, scheduling=SchedulingParams(model="")),
        arrival_ns=middle,
        outputs=[SequenceOutput(num_tokens=20, reason="length")],
    )
    slow = [
        structs.replace(
            each,
            arrival=structs.replace(each.arrival, max_tokens=400),
            outputs=[SequenceOutput(num_tokens=400, reason="length")],
        )
        if number % 10 == 0
        else each
        for number, each in enumerate(workload.requests)
    ]
    requests = sorted([*slow, large, large, large], key=lambda each: each.arrival_ns)
    run = record_load(
        tmp_path, structs.replace(workload, requests=requests), {"max_skips": 0, "max_num_seqs": 64}, num_blocks=66
    )
    found = {finding.kind: finding for finding in find_all(open_index(run))}
    assert found["head_of_line"].culprit.endswith("max_skips 0")
    assert found["head_of_line"].figures["blocked_share_ppm"] > 80_000
    # It arrived with others, in a drain that had no plans yet.
    with Session.open(run) as session:
        session.execute(f"goto {found['head_of_line'].s}")
        assert "blocks" in "\n".join(session.execute(found["head_of_line"].command).lines())
