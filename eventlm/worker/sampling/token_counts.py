"""Which tokens a penalized sequence has had, and how often its output had each.

A row lists its different tokens, in no order, padded to the longest row with -1. That is a few thousand entries where
a count of the whole vocabulary would be a hundred thousand, for each sequence and step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RowCounts(NamedTuple):
    """Different token ids int64 [R, N] of R rows, padded with -1, and how often the output had each, int64 [R, N]."""

    ids: np.ndarray
    counts: np.ndarray


class TokenCounts:
    """Rows come and go; a row's number is kept until it is removed."""

    def __init__(self) -> None:
        self._ids = np.full((4, 64), -1, dtype=np.int64)
        self._counts = np.zeros_like(self._ids)
        self._used = np.zeros(4, dtype=np.int64)
        self._free = list(range(4))

    def add(self, token_ids: list[int], num_prompt_tokens: int) -> int:
        """A row for a sequence with this history, prompt first; returns its number."""
        different, indices = np.unique(np.array(token_ids, dtype=np.int64), return_inverse=True)
        if not self._free:
            self._free = list(range(len(self._used), 2 * len(self._used)))
            self._grow(num_rows=2 * len(self._used))
        row, used = self._free.pop(), len(different)
        self._widen(used)
        self._ids[row] = -1
        self._ids[row, :used] = different
        self._counts[row] = 0
        self._counts[row, :used] = np.bincount(indices[num_prompt_tokens:], minlength=used)
        self._used[row] = used
        return row

    def remove(self, row: int) -> None:
        """The row's sequence has left."""
        self._free.append(row)

    def append(self, rows_R: np.ndarray, tokens_R: np.ndarray) -> None:
        """One more output token of each of these different rows."""
        width = int(self._used[rows_R].max())
        self._widen(width + 1)
        same = self._ids[rows_R, :width] == tokens_R[:, None]
        is_known = same.any(axis=1)
        indices = np.where(is_known, same.argmax(axis=1), self._used[rows_R])
        self._ids[rows_R, indices] = tokens_R
        self._counts[rows_R, indices] += 1
        self._used[rows_R] += ~is_known

    def take(self, rows_R: np.ndarray) -> RowCounts:
        """The entries of these rows."""
        width = int(self._used[rows_R].max())
        return RowCounts(self._ids[rows_R, :width], self._counts[rows_R, :width])

    def _widen(self, width: int) -> None:
        if width > self._ids.shape[1]:
            self._grow(width=max(width, 2 * self._ids.shape[1]))

    def _grow(self, *, num_rows: int = 0, width: int = 0) -> None:
        more = ((0, max(0, num_rows - len(self._used))), (0, max(0, width - self._ids.shape[1])))
        self._ids = np.pad(self._ids, more, constant_values=-1)
        self._counts = np.pad(self._counts, more)
        self._used = np.pad(self._used, more[0])
