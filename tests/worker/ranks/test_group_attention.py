"""Attention in torch's operations where a rank has some shards of each context."""

from __future__ import annotations

from array import array

import pytest
import torch

from eventlm.worker.ranks.group_attention import build_group_batch, merge_parts
from eventlm.worker.ranks.kv_group import GroupStep, OwnRow
from eventlm.worker.sequence_table import Row, WorkerSequence
from tests.worker.launches import new_sequence


def test_parts_make_up_the_whole() -> None:
    torch.manual_seed(1)
    scores, values = torch.randn(3, 2, 12) * 4, torch.randn(12, 5)
    parts = []
    # Of the first nothing is seen, as where a window ends before it.
    for begin, end in ((0, 0), (0, 3), (3, 11), (11, 12)):
        own = scores[..., begin:end]
        maximum = own.amax(-1, keepdim=True) if begin < end else torch.full((3, 2, 1), -1e29)
        weights = (own - maximum).exp()
        parts.append(torch.cat((maximum, weights.sum(-1, keepdim=True), weights @ values[begin:end]), dim=-1))
    torch.testing.assert_close(merge_parts(parts), scores.softmax(-1) @ values)


@pytest.mark.parametrize("is_stored", [True, False])
def test_only_what_lies_here_is_stored(is_stored: bool) -> None:
    sequence = WorkerSequence(new_sequence(1, list(range(100, 164))))
    whole = OwnRow(Row(sequence, 0, 5, True), 0, (1,), 0, array("i", [7, 3]), 0, True, -1)
    shared = OwnRow(Row(sequence, 20, 2, True), 2, (0, 1), 1, array("i", [5, 2, 1]), 8, is_stored, 0)
    batch = build_group_batch(GroupStep([whole, shared], 2), 4)
    assert batch.token_ids_T.tolist() == [100, 101, 102, 103, 104, 120, 121]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 20, 21]
    assert batch.whole_T.tolist() == [0, 1, 2, 3, 4]
    assert batch.stored_T.tolist() == [0, 1, 2, 3, 4, *([5, 6] if is_stored else [])]
    assert batch.slots_T.tolist() == [28, 29, 30, 31, 12, *([4, 5] if is_stored else [])]
    # The rest of the block that each row enters.
    assert batch.tails_R.tolist() == [13, 14, 15, *([6, 7] if is_stored else [])]
    assert [(first, own.number) for first, own in batch.shared] == [(5, 2)]
