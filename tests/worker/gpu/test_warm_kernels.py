"""Which steps are run before a worker is ready, so that none of a request's meets a kernel first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eventlm.events import Launched
from eventlm.worker.gpu.warm_kernels import warm_kernels
from eventlm.worker.protocol import StepPayload


def steps_for(*, max_num_seqs: int, max_num_batched_tokens: int) -> list[Launched]:
    """All launches with rows."""
    launches: list[Launched] = []

    def execute(launch: Launched, payload: StepPayload) -> None:
        if launch.num_tokens:
            launches.append(launch)

    setup = SimpleNamespace(
        replica=0, epoch=1, block_size=16, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    runner: Any = SimpleNamespace(setup=setup, execute=execute)
    warm_kernels(runner)
    return launches


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "num_decodes"),
    [
        (1, 64, [0]),
        (2, 64, [0, 1]),
        (9, 64, [0, 1, 2, 4, 8]),
        (12, 64, [0, 1, 2, 4, 8, 11]),
        (12, 12, [0, 1, 2, 4, 8, 10]),
        (5, 5, [0, 1, 2, 3]),
        (1, 1, [0]),
    ],
)
def test_steps_go_up_to_the_largest_within_the_limits(
    max_num_seqs: int, max_num_batched_tokens: int, num_decodes: list[int]
) -> None:
    launches = steps_for(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert [len(launch.decodes) for launch in launches] == 3 * num_decodes
    assert max(len(launch.decodes) + len(launch.chunks) for launch in launches) <= max_num_seqs
