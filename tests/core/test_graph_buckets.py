"""Which graph a step runs as: the smallest that holds its decodes, none where it has chunks or too many rows."""

from __future__ import annotations

import pytest

from eventlm.core.graph_buckets import bucket_of, default_buckets
from eventlm.events import Launched
from eventlm.events.codec import decode_body, encode_body
from tests.core.rig import Rig, arrival
from tests.simulation import MemoryLog, Simulation
from tests.workload import GRAPH_BUCKETS


@pytest.mark.parametrize(("max_num_seqs", "wanted"), [
    (1, [1]),
    (3, [1, 2, 3]),
    (8, [1, 2, 4, 8]),
    (10, [1, 2, 4, 8, 10]),
    (16, [1, 2, 4, 8, 16]),
    (50, [1, 2, 4, 8, 16, 32, 48, 50]),
])  # fmt: skip
def test_sizes_reach_from_one_row_to_the_largest_step(max_num_seqs: int, wanted: list[int]) -> None:
    assert default_buckets(max_num_seqs) == wanted


@pytest.mark.parametrize("max_num_seqs", [512, 513, 10**12])
def test_large_steps_have_none(max_num_seqs: int) -> None:
    buckets = default_buckets(max_num_seqs)
    assert buckets == [1, 2, 4, 8, *range(16, 513, 16)]
    assert bucket_of(buckets, 513) == 0


def test_the_smallest_that_is_large_enough_is_taken() -> None:
    assert [bucket_of([1, 2, 8], num_rows) for num_rows in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, 0]
    assert bucket_of([], 1) == 0


def test_steps_of_decodes_alone_have_one() -> None:
    rig = Rig(graph_buckets=[2, 4])
    rig.arrive_all(*(arrival(4, max_tokens) for max_tokens in (2, 3, 4, 5, 6)))
    found = []
    while rig.flying[0]:
        launched = rig.flying[0][0]
        found.append((len(launched.chunks), len(launched.decodes), launched.bucket))
        if len(found) == 3:
            rig.arrive(4, 1)
        rig.complete()
    assert found == [(5, 0, 0), (0, 5, 0), (0, 4, 4), (1, 3, 0), (0, 2, 2), (0, 1, 2)]


def test_a_step_without_one_is_written_as_before() -> None:
    rig = Rig(graph_buckets=[1])
    rig.arrive()
    (launched,) = rig.of(Launched)
    assert b"bucket" not in encode_body(launched)
    rig.complete()
    (launched,) = rig.of(Launched)
    assert encode_body(launched).endswith(b',"bucket":1')


def test_every_step_of_random_workloads_has_the_right_one() -> None:
    num_graphs = num_too_large = 0
    for seed in (*range(8, 24, 2), 31, *range(34, 42, 2)):
        log = MemoryLog()
        simulation = Simulation(seed, writer=log, check_every=0)
        simulation.run()
        buckets = simulation.machine.core.graph_buckets
        assert buckets == GRAPH_BUCKETS[seed // 7 % 3]
        for launched in map(decode_body, log.bodies):
            if isinstance(launched, Launched):
                fitting = [size for size in buckets if size >= len(launched.decodes)]
                assert launched.bucket == (fitting[0] if fitting and not launched.chunks else 0), f"workload {seed}"
                num_graphs += launched.bucket > 0
                num_too_large += not fitting and not launched.chunks and bool(buckets)
    assert num_graphs > 100
    assert num_too_large > 0
