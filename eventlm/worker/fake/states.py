"""Recurrent layers of the fake worker: the state of a sequence is a hash of all the tokens that it has seen, so a state
that was taken from, or left in, a wrong slot changes all tokens that follow.
"""

from __future__ import annotations

from collections.abc import Iterable

from eventlm.worker.sequence_table import Row

_MODULUS = (1 << 61) - 1
_FACTOR = 0x2545F4914F6CDD1D % _MODULUS


def fold(state: int, token_ids: Iterable[int]) -> int:
    """A state after some more tokens; 0 is that before any."""
    for token_id in token_ids:
        state = (state * _FACTOR + token_id + 1) % _MODULUS
    return state


class FakeStates:
    """Slots 0 to num_slots - 1. Nothing clears a slot but a row that begins from zero."""

    def __init__(self, num_slots: int) -> None:
        self._states = [0] * num_slots

    def advance(self, row: Row) -> int:
        """Compute the state of a row's sequence, which the rows before it have left as it is, and keep its copies.

        Returns the state after the row's last token.
        """
        sequence = row.sequence
        state = 0 if row.state_source < 0 else self._states[row.state_source]
        first = row.start
        for end, slot in (*row.state_copies, (row.start + row.num_tokens, sequence.state_slot)):
            self._states[slot] = state = fold(state, sequence.token_ids[first:end])
            first = end
        return state
