from __future__ import annotations

import torch

from eventlm.kernels.sequence_states import StateRow, StepStates


def test_states_follow_their_rows() -> None:
    """Each token adds one: a state says how many tokens of its sequence are in it."""
    memory = torch.full((6, 3), torch.nan)
    memory[1, 1] = 10.0
    rows = [
        StateRow(3, slot=0, source=-1, copies=[(2, 4), (3, 5)]),
        # From a copy that the row before keeps, and onto a slot that it is read from.
        StateRow(4, slot=2, source=4, copies=[(1, 4)]),
        StateRow(1, slot=1, source=1),
    ]
    pieces = []
    for tokens, state in StepStates(memory, rows).pieces(slice(1, 2)):
        pieces.append((tokens.start, tokens.stop))
        state += tokens.stop - tokens.start
    assert pieces == [(0, 2), (2, 3), (3, 4), (4, 7), (7, 8)]
    assert memory[[0, 1, 2, 4, 5], 1].tolist() == [3.0, 11.0, 6.0, 3.0, 3.0]
    assert memory[:, [0, 2]].isnan().all()
    assert memory[3].isnan().all()
