"""Blocks of another size, arrivals closer together, groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.errors import UsageError
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest, resize_blocks
from tests.made_requests import make_arrival


def request(arrival_ns: int, **fields: int) -> WorkloadRequest:
    arrival = make_arrival(model="", prompt_tokens=10, max_tokens=4, **fields)
    return WorkloadRequest(arrival=arrival, arrival_ns=arrival_ns, outputs=[SequenceOutput()])


def chain(tokens: list[int], size: int) -> list[int]:
    """Names of a prompt's blocks of `size` as a public trace has them: by all content up to there, the last partial."""
    return [hash(tuple(tokens[:end])) & (2**40 - 1) for end in range(size, len(tokens) + size, size)]


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40)


@given(prompts, prompts, st.sampled_from([(8, 2), (8, 8), (8, 4), (2, 8), (2, 4)]))
def test_resized_blocks_share_what_the_prompts_share(one: list[int], other: list[int], sizes: tuple[int, int]) -> None:
    """Never more than the truth, nothing twice, and all of it up to the last given block that both have whole."""
    given_size, size = sizes
    names = [
        resize_blocks(chain(prompt, given_size), from_size=given_size, to_size=size, num_tokens=len(prompt))
        for prompt in (one, other)
    ]
    for prompt, found in zip((one, other), names, strict=True):
        assert len(found) == len(prompt) // size
        assert len(set(found)) == len(found)
    common = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    shared = next((i for i, (x, y) in enumerate(zip(*names, strict=False)) if x != y), min(map(len, names)))
    assert set(names[0][shared:]).isdisjoint(names[1][shared:])
    assert shared * size <= common
    assert shared >= common // given_size * given_size // size


def test_blocks_that_do_not_fit_into_each_other() -> None:
    with pytest.raises(UsageError, match="512 tokens and the engine's 48"):
        resize_blocks([1, 2], from_size=512, to_size=48, num_tokens=1000)


def test_sped_up() -> None:
    workload = Workload(source="", requests=[request(100), request(400), request(1000)])
    assert [r.arrival_ns for r in workload.sped_up(1_500_000).requests] == [100, 300, 700]
    assert workload.sped_up(500_000).duration_ns == 1800
    assert workload.sped_up(1_000_000) is workload
    for factor in (0, -1):
        with pytest.raises(UsageError, match="positive"):
            workload.sped_up(factor)


def test_groups_stay_together() -> None:
    members = [request(5, group_size=2, group_index=index) for index in (0, 1)]
    workload = Workload(source="", requests=[request(1), *members, request(9)])
    assert workload.groups() == [range(1), range(1, 3), range(3, 4)]
