"""The table of transitions, and the lengths of a sequence."""

from __future__ import annotations

import itertools

import pytest

from eventlm.core.state.sequence import IllegalTransitionError, Sequence, State
from eventlm.errors import InvariantError
from tests.core.rig import arrival
from tests.policies.views import view

#: Written out once more, so that an edit of the table is a decision and no slip.
LEGAL = {
    "WAITING_FOR_GRAMMAR": {"WAITING", "FINISHED"},
    "WAITING": {"PREFILL", "CLOSING", "FINISHED"},
    "PREFILL": {"DECODE", "WAITING", "FINISHED"},
    "DECODE": {"WAITING", "CLOSING", "FINISHED"},
    "CLOSING": {"FINISHED"},
    "FINISHED": set(),
}


def sequence(prompt_tokens: int = 10, max_tokens: int = 6, **fields: object) -> Sequence:
    return Sequence(arrival(prompt_tokens, max_tokens, s=7, **fields), 2, view(request=7, index=2))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_every_step_is_legal_or_raises_with_all_that_one_needs_to_know(before: State, after: State) -> None:
    subject = sequence()
    subject.state = before
    if after.name in LEGAL[before.name]:
        subject.transition(after)
        assert subject.state is after
        return
    with pytest.raises(IllegalTransitionError) as raised:
        subject.transition(after)
    assert subject.state is before
    for word in ("7.2", before.name, after.name):
        assert word in str(raised.value)
    assert isinstance(raised.value, InvariantError)
    assert raised.value.exit_code == 11


def test_a_new_sequence_waits_or_waits_for_its_grammar() -> None:
    assert sequence().state is State.WAITING
    assert sequence(waits_for_grammar=True).state is State.WAITING_FOR_GRAMMAR


@pytest.mark.parametrize(("total", "num_names", "wanted"), [
    (8, 2, 1),  # the last prompt token is computed, so its block is not hit whole
    (9, 2, 2), (12, 3, 2), (13, 3, 3), (13, 1, 1), (1, 0, 0), (4, 1, 0), (5, 1, 1),
])  # fmt: skip
def test_hits_are_whole_blocks_and_end_before_the_last_token(total: int, num_names: int, wanted: int) -> None:
    subject = sequence(total, 6, blocks=list(range(1, num_names + 1)))
    assert subject.max_hit_blocks(4) == wanted


@pytest.mark.parametrize(("prompt_tokens", "max_tokens", "wanted"), [
    (4, 4, 2), (4, 1, 2), (3, 1, 1), (4, 100, 2), (5, 100, 3), (5, 2, 2), (8, 0, 2),
])  # fmt: skip
def test_admission_takes_the_whole_prompt_and_one_block_within_the_limit(
    prompt_tokens: int, max_tokens: int, wanted: int
) -> None:
    assert sequence(prompt_tokens, max_tokens).blocks_to_admit(4) == wanted


def test_its_repr_shows_its_state() -> None:
    assert repr(sequence()) == "<7.2 WAITING 10/16 tokens, launched 0/10, 0 blocks, 0 in flight>"
