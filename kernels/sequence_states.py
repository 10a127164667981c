"""The states that layers keep of sequences, and what becomes of them in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StateRow(NamedTuple):
    """A row of a step: `num_tokens` of the sequence whose state is in `slot`.

    source: the slot that the state is copied from first; -1: it begins as zeros. copies: (count, slot), ascending, for
    each slot that the state is copied to when so many tokens of the row are in it.
    """

    num_tokens: int
    slot: int
    source: int
    copies: Sequence[tuple[int, int]] = ()


class StepStates(NamedTuple):
    """The states of all sequences, float32 [slots, state_size of the model], and the rows of a step in their order."""

    memory: Tensor
    rows: Sequence[StateRow]

    def pieces(self, part: slice) -> Iterator[tuple[slice, Tensor]]:
        """Tokens of the step, row after row, in pieces that end where a state is copied, each with its row's state.

        part: the numbers of a slot that are wanted. The caller brings the state to the end of the piece, in place,
        before it asks for the next.
        """
        first_token = 0
        for num_tokens, slot, source, copies in self.rows:
            state = self.memory[slot, part]
            if source < 0:
                state.zero_()
            elif source != slot:
                state.copy_(self.memory[source, part])
            begin = 0
            for end, to in (*copies, (num_tokens, slot)):
                if end > begin:
                    yield slice(first_token + begin, first_token + end), state
                if to != slot:
                    self.memory[to, part] = state
                begin = end
            first_token += num_tokens


NO_STATES = StepStates(torch.empty(0, 0), ())
