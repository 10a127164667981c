"""A very long prefill gives way by its slack, against the definition; short prompts gain by it, and only they."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.core.plugin import Batcher, StepLoad
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.policies.dynamic import Dynamic
from eventlm.policies.space_sharing import SpaceSharing
from tests.core.rig import MILLISECOND, Rig
from tests.policies.views import view

PREDICTOR = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)
SECOND = 1000 * MILLISECOND
#: A prompt of 2,000 tokens takes about 100 ms on the machine below, 10 steps of 10 ms.
LONG_TOKENS = 2000
TARGET_MS = 10


@given(
    max_tokens=st.integers(1, 400),
    num_tokens=st.integers(0, 150),
    # Up to 200 tokens fit into the target time.
    budget_tokens=st.one_of(st.just(0), st.integers(151, 500)),
    prefill_ns=st.sampled_from([99 * MILLISECOND, 100 * MILLISECOND, 101 * MILLISECOND, 7 * SECOND]),
    deadline_ns=st.one_of(st.just(0), st.integers(1, 20 * SECOND)),
    now_ns=st.integers(0, 10 * SECOND),
    max_share=st.sampled_from(["0.5", "0.9", "0", "1"]),
)
def test_chunks(
    max_tokens: int,
    num_tokens: int,
    budget_tokens: int,
    prefill_ns: int,
    deadline_ns: int,
    now_ns: int,
    max_share: str,
) -> None:
    deadline = deadline_ns or max(prefill_ns * 3 // 2, SECOND // 2)
    slack = floor(Fraction(deadline - now_ns - prefill_ns, deadline) * 1_000_000)
    share = Fraction(min(max(slack, 0), int(Fraction(max_share) * 1_000_000)), 1_000_000)
    if prefill_ns <= 100 * MILLISECOND:
        share = Fraction(0)
    load = StepLoad(now_ns=now_ns, budget_tokens=budget_tokens)
    load.add_chunk(0, num_tokens)
    if budget_tokens:
        max_tokens = min(max_tokens, budget_tokens - num_tokens)
    most = floor(budget_tokens * (1 - share)) - num_tokens if budget_tokens else max_tokens
    fits = load.largest_chunk(PREDICTOR, floor(10 * MILLISECOND * (1 - share)), 0, max(min(most, max_tokens), 0))
    batcher = SpaceSharing(target_ms=10, min_chunk_tokens=8, max_share=float(max_share))
    asked = view(deadline_ns=deadline_ns, prefill_ns=prefill_ns)
    assert batcher.chunk_tokens(load, asked, max_tokens, PREDICTOR) == min(max(fits, 8), max_tokens)


def test_the_deadline_is_that_of_the_policies_with_the_same_parameters() -> None:
    asked = view(prefill_ns=2 * SECOND)
    tokens = {
        multiplier: SpaceSharing(multiplier=multiplier).chunk_tokens(StepLoad(), asked, 10_000, PREDICTOR)
        for multiplier in (1, 1.25, 2, 4)
    }
    assert tokens[1] == Dynamic().chunk_tokens(StepLoad(), asked, 10_000, PREDICTOR)
    # Slack is 0, a fifth, a half and three quarters of the deadline; more than a half is not given.
    assert tokens[1] > tokens[1.25] > tokens[2] == tokens[4] > 0


def make_rig(batcher: Batcher, budget_tokens: int) -> Rig:
    return Rig(
        batcher=batcher,
        block_size=16,
        num_blocks=400,
        max_model_len=4000,
        max_num_batched_tokens=budget_tokens,
    )


def steps_to_first_token(rig: Rig, request: int) -> int:
    """Completes steps until the request has a token; how many that took."""
    for num_steps in range(1, 1000):
        rig.complete(at=rig.now_ns + TARGET_MS * MILLISECOND)
        if request not in rig.state.requests or rig.sequence(request).num_output_tokens:
            return num_steps
    raise AssertionError("it has no token after 1,000 steps")


BATCHERS = (
    Dynamic(target_ms=TARGET_MS, min_chunk_tokens=1),
    SpaceSharing(target_ms=TARGET_MS, min_chunk_tokens=1, min_long_steps=5),
)


@pytest.mark.parametrize("budget_tokens", [4000, 100])
def test_a_short_prompt_beside_a_very_long_one_has_its_first_token_earlier(budget_tokens: int) -> None:
    # With 4,000 tokens the target time ends a step, with 100 the budget.
    steps = {}
    for batcher in BATCHERS:
        rig = make_rig(batcher, budget_tokens)
        rig.arrive(LONG_TOKENS, 1, deadline_ns=20 * SECOND)
        rig.arrive(40, 1)
        short = max(rig.state.requests)
        steps[type(batcher)] = steps_to_first_token(rig, short)
    # The step in flight when it came, and the one it has its part of.
    assert steps[SpaceSharing] == 2
    assert steps[Dynamic] > 5


def test_once_its_slack_is_gone_the_long_one_gets_the_whole_target() -> None:
    sizes = {}
    for batcher in BATCHERS:
        rig = make_rig(batcher, 4000)
        # 150 ms for about 100 ms of work: it gives way at first.
        long = rig.arrive(LONG_TOKENS, 1, deadline_ns=150 * MILLISECOND)
        sizes[type(batcher)] = []
        while long in rig.state.requests:
            ((request, _, _, num_tokens, _),) = rig.flying[0][0].chunks
            assert request == long
            sizes[type(batcher)].append((rig.sequence(long).view.slack_ns(rig.now_ns), num_tokens))
            rig.complete(at=rig.now_ns + 2 * TARGET_MS * MILLISECOND)
    whole = sizes[Dynamic][0][1]
    (first_slack, first), *rest = sizes[SpaceSharing]
    assert first_slack > 0
    assert first < whole * 9 // 10
    late = [num_tokens for slack, num_tokens in rest[:-1] if slack < 0]
    assert len(late) > 3
    # The context that attention reads grows, so chunks shrink by a few tokens.
    assert all(whole * 9 // 10 < num_tokens <= whole for num_tokens in late)


def test_one_that_is_not_very_long_gives_nothing_away() -> None:
    launches = []
    for batcher in (BATCHERS[0], SpaceSharing(target_ms=TARGET_MS, min_chunk_tokens=1, min_long_steps=50)):
        rig = make_rig(batcher, 4000)
        rig.arrive(LONG_TOKENS, 1, deadline_ns=20 * SECOND)
        rig.finish_all()
        launches.append([decision for decision in rig.decisions if "chunks" in decision.__struct_fields__])
    assert launches[0] == launches[1]


@pytest.mark.parametrize("parameters", [
    {"target_ms": 0}, {"min_chunk_tokens": 0}, {"min_long_steps": -1}, {"max_share": 1.5}, {"max_share": -0.1},
    {"multiplier": 0}, {"min_deadline_ms": 0},
])  # fmt: skip
def test_parameters_are_checked(parameters: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(parameters))):
        resolve("batcher", {"type": "space_sharing", **parameters})
