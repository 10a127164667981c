"""Longest prefix match: cached tokens first, and waiting makes up for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.core.plugin import SequenceView
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.events import PolicySwapped
from eventlm.policies.lpm import Lpm
from eventlm.policies.lrs import Lrs
from eventlm.types import NANOSECONDS_PER_SECOND
from tests.core.rig import MILLISECOND, Rig, arrival
from tests.policies.views import view

SHARED = [11, 12, 13, 14]


def first(policy: Lpm, *views: SequenceView) -> int:
    """The request that goes first of views in order of arrival."""
    keys = policy.keys(views, now_ns=10**12)
    return views[keys.index(min(keys))].request


def test_more_cached_tokens_go_first() -> None:
    views = [view(request=n, arrival_ns=n, cached_tokens=cached) for n, cached in enumerate([16, 64, 0, 64])]
    assert first(Lpm(), *views) == 1


def test_waiting_counts_like_cached_tokens() -> None:
    for seconds, winner in ((3, 2), (4, 1), (5, 1)):
        views = view(request=1), view(request=2, arrival_ns=seconds * NANOSECONDS_PER_SECOND, cached_tokens=1000)
        assert first(Lpm(ageing_tokens_per_s=250), *views) == winner
        assert first(Lpm(ageing_tokens_per_s=100), *views) == 2


@given(
    arrivals=st.lists(st.integers(0, 2**53 - 1), min_size=2, max_size=2).map(sorted),
    rate=st.integers(1, 10**6),
    max_model_len=st.integers(1, 10**6),
    data=st.data(),
)
def test_no_request_is_overtaken_by_one_that_came_a_context_later(
    arrivals: list[int], rate: int, max_model_len: int, data: st.DataObject
) -> None:
    cached = data.draw(st.integers(0, max_model_len - 1))
    earlier, later = view(arrival_ns=arrivals[0]), view(arrival_ns=arrivals[1], cached_tokens=cached)
    before, after = Lpm(ageing_tokens_per_s=rate).keys([earlier, later], 2**53)
    if (arrivals[1] - arrivals[0]) * rate >= max_model_len * NANOSECONDS_PER_SECOND:
        assert before <= after


def steps_until_admitted(ageing_tokens_per_s: int, num_newcomers: int) -> int | None:
    """One slot, a request that shares nothing, and newcomers that share 16 tokens, as many as can be served: one each
    millisecond. How many of them go before it; None if all.
    """
    rig = Rig(policy=Lpm(ageing_tokens_per_s=ageing_tokens_per_s), max_num_seqs=1)
    rig.arrive(17, 1, blocks=SHARED)
    rig.complete()
    running = rig.arrive(17, 1, blocks=SHARED)
    alone = rig.arrive(17, 1, blocks=[21, 22, 23, 24])
    for newcomer in range(num_newcomers):
        assert running in rig.state.requests
        rig.feed(rig.completion(), arrival(17, 1, blocks=SHARED))
        if alone in rig.state.requests and rig.sequence(alone).resident:
            return newcomer
        running = rig.state.replicas[0].running[0].request
    return None


def test_newcomers_with_a_prefix_go_first_but_not_for_ever() -> None:
    # 16 cached tokens outweigh 16 s, 40 ms and 8 ms of waiting.
    assert steps_until_admitted(1, 100) is None
    assert steps_until_admitted(400, 100) in range(38, 43)
    assert steps_until_admitted(2000, 100) in range(6, 11)


def test_a_waiting_sequence_sees_what_it_can_hit_now() -> None:
    rig = Rig(policy=Lpm(), max_num_seqs=1, num_replicas=2)
    keeper = rig.arrive(17, 20, blocks=SHARED)
    other = rig.arrive(17, 20, blocks=[21, 22, 23, 24])
    assert rig.sequence(keeper).replica != rig.sequence(other).replica
    half = rig.arrive(17, 1, blocks=[11, 12, 33, 34])
    none = rig.arrive(17, 1, blocks=[12, 13, 14, 15])
    bypass = rig.arrive(17, 1, blocks=SHARED, skip_cache_read=True)
    whole = rig.arrive(16, 1, blocks=[21, 22, 23, 24])
    rig.complete(0)
    cached = {request: rig.sequence(request).view.cached_tokens for request in (half, none, bypass, whole)}
    # Hits end before the last token of a prompt.
    assert cached == {half: 8, none: 0, bypass: 0, whole: 12}
    rig.lose(rig.sequence(keeper).replica)
    rig.complete(rig.sequence(other).replica)
    assert rig.sequence(half).view.cached_tokens == 0
    assert rig.sequence(whole).view.cached_tokens == 12


def test_paths_are_remembered_of_those_that_wait_alone() -> None:
    rig = Rig(policy=Lpm(), max_num_seqs=1)
    rig.arrive(17, 1, blocks=SHARED)
    for _ in range(200):
        rig.feed(rig.completion(), arrival(17, 1, blocks=SHARED), arrival(17, 1, blocks=SHARED))
        rig.complete()
    [running] = rig.state.replicas[0].running
    assert running.paths == {}
    # Paths lie with the sequences, and those that have ended are gone.
    assert len(rig.state.requests) == 1 + rig.state.num_waiting


def test_other_policies_do_not_see_it() -> None:
    rig = Rig(policy=Lpm(), others={"lrs": Lrs()}, max_num_seqs=1)
    rig.arrive(17, 20, blocks=SHARED)
    waiting = rig.arrive(17, 1, blocks=SHARED)
    rig.complete()
    assert rig.sequence(waiting).view.cached_tokens == 16
    rig.feed(PolicySwapped(name="lrs"))
    rig.complete()
    assert rig.sequence(waiting).view.cached_tokens == 0
    rig.feed(PolicySwapped(name="first"))
    rig.complete()
    assert rig.sequence(waiting).view.cached_tokens == 16


def test_no_sequence_is_evicted_for_a_prefix() -> None:
    rig = Rig(policy=Lpm(), max_num_seqs=1)
    rig.arrive(17, 1, blocks=SHARED)
    rig.complete()
    rig.arrive(20, 5)
    rig.arrive(17, 1, blocks=SHARED)
    rig.finish_all()
    assert rig.preempted() == []
    assert rig.now_ns > 5 * MILLISECOND


@pytest.mark.parametrize("parameters", [
    {"ageing_tokens_per_s": 0}, {"ageing_tokens_per_s": 2.5}, {"ageing": 1},
])  # fmt: skip
def test_parameters_are_checked(parameters: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(parameters))):
        resolve("policy", {"type": "lpm", **parameters})
