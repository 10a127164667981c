"""Picks the next token of each row: its logits processed, then greedy, or by temperature, min-p, top-k and top-p.

A batch is split by how its rows draw, and each part costs a few tensor operations whatever its number of rows; a large
one goes in slices, so that its float32 copies have a bounded size.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from eventlm.kernels.cpu.decoder import DrawRows
from eventlm.worker.sampling.candidates import mask_candidates
from eventlm.worker.sampling.logits_processors import process_logits
from eventlm.worker.sampling.noise import hash_ids, negative_gumbel_noise, noise_keys
from eventlm.worker.sampling.sampling_table import GREEDY, MASKED, PROCESSED, SampledRows, SamplingTable, column
from eventlm.worker.sampling.vocabulary_masks import Masks
from eventlm.worker.sequence_table import WorkerSequence

#: Candidates that a masked row is first given, and if its nucleus does not fit; then it gets the vocabulary.
_NUM_CANDIDATES = (64, 1024)
#: Logits that are copied to float32 at once: 16 MiB.
SLICE_ENTRIES = 1 << 22
#: Noise that is made at once, so that it stays in the processor's cache.
_NOISE_ENTRIES = 1 << 17


#: In place of a token id: the row's logits contain NaN or plus infinity, so there is nothing to draw from.
NOT_FINITE = -1

#: One token id a row, or NOT_FINITE, of logits float32 [S, V] over the whole vocabulary. The lowest id of equal scores.
Draw = Callable[[Tensor, DrawRows], list[int]]
#: As `Draw`, of the last layer's hidden states, float32 [S, H], where nothing else needs the logits.
DrawNext = Callable[[Tensor, DrawRows], list[int]]


class Sampler:
    """Draws for the sequences in its table; `draw` and `draw_next`, if given, in place of torch's operations."""

    def __init__(
        self, vocab_size: int, device: torch.device, *, draw: Draw | None = None, draw_next: DrawNext | None = None
    ) -> None:
        self.table = SamplingTable(vocab_size)
        self._device = device
        self._draw_whole = draw
        self._draw_next = draw_next
        #: What of their needs keeps rows from being drawn together.
        self._drawn_apart = MASKED | PROCESSED | (GREEDY if draw is None else 0)
        self._hashed_ids_V = hash_ids(torch.arange(vocab_size, dtype=torch.int32, device=device))

    def draw_next(self, hidden_SH: Tensor, sequences: Sequence[WorkerSequence]) -> list[int] | None:
        """One token id for each of these different sequences; None if one of them needs its logits."""
        if self._draw_next is None:
            return None
        rows = self.table.draw_rows(sequences)
        return self._draw_next(hidden_SH, rows) if rows is not None else None

    def sample(
        self,
        logits_SV: Tensor,
        sequences: Sequence[WorkerSequence],
        *,
        forced_S: np.ndarray | None = None,
        masks: Masks | None = None,
    ) -> np.ndarray:
        """One token id for each of these different sequences, or NOT_FINITE, int64 [S].

        logits_SV: any floating dtype, not changed.

        forced_S: what the sequences go on with, where that is not what is drawn. masks: of those with a grammar.
        """
        rows = self.table.rows(sequences, masks)
        tokens_S = np.empty(len(sequences), dtype=np.int64)
        for numbers in _parts(rows.params["needs"] & self._drawn_apart):
            whole = len(numbers) == len(sequences)
            part, logits = (rows, logits_SV) if whole else (rows.take(numbers), logits_SV[torch.from_numpy(numbers)])
            tokens_S[numbers] = self._draw(logits, part).cpu().numpy()
        self.table.record(rows, tokens_S if forced_S is None else forced_S)
        return tokens_S

    def _draw(self, logits_SV: Tensor, rows: SampledRows) -> Tensor:
        """Of rows that draw alike; token ids int64 [S]."""
        needs = int(rows.params["needs"][0])
        if needs & MASKED:
            draw = self._draw_masked
        elif self._draw_whole is not None:
            draw = self._draw_compiled
        elif needs & GREEDY:
            draw = _draw_greedy
        else:
            draw = self._draw_free
        if not needs & (PROCESSED | MASKED):
            return draw(logits_SV, rows)
        drawn = []
        for span in slices(len(logits_SV), logits_SV.shape[1], SLICE_ENTRIES):
            part = rows.take(np.arange(span.start, span.stop))
            logits = logits_SV[span]
            if needs & PROCESSED:
                logits = logits.to(torch.float32, copy=True)
                process_logits(logits, part, self.table)
            drawn.append(draw(logits, part))
        return torch.cat(drawn)

    def _draw_compiled(self, logits_SV: Tensor, rows: SampledRows) -> Tensor:
        """Greedy rows among the others."""
        assert self._draw_whole is not None
        temperatures = np.where(rows.params["needs"] & GREEDY, 0.0, rows.params["temperature"])
        draws = DrawRows(temperatures.tolist(), rows.params["key"].tolist(), rows.positions.tolist())
        return torch.tensor(self._draw_whole(logits_SV, draws))

    def _draw_free(self, logits_SV: Tensor, rows: SampledRows) -> Tensor:
        """From the whole vocabulary."""
        keys = self._keys(rows)
        temperatures = column(rows.params, "temperature", self._device)
        drawn = []
        for span in slices(len(logits_SV), logits_SV.shape[1], _NOISE_ENTRIES):
            scores = logits_SV[span] / temperatures[span]
            scores -= negative_gumbel_noise(keys[span], self._hashed_ids_V)
            drawn.append(_best(scores))
        return torch.cat(drawn)

    def _draw_masked(self, logits_SV: Tensor, rows: SampledRows) -> Tensor:
        """From the most likely entries; rows for which they do not suffice are given more."""
        vocab_size = logits_SV.shape[1]
        tokens_S = torch.empty(len(logits_SV), dtype=torch.int64, device=self._device)
        left = torch.arange(len(logits_SV), device=self._device)
        for num_candidates in (*(number for number in _NUM_CANDIDATES if number < vocab_size), vocab_size):
            part = rows if len(left) == len(tokens_S) else rows.take(left.cpu().numpy())
            logits = logits_SV if part is rows else logits_SV[left]
            candidates = mask_candidates(logits, part.params, num_candidates)
            noise = negative_gumbel_noise(self._keys(part), self._hashed_ids_V[candidates.ids])
            best = (candidates.scores - noise).argmax(dim=-1, keepdim=True)
            tokens = candidates.ids.gather(1, best)[:, 0]
            tokens_S[left] = torch.where(candidates.scores[:, 0] < torch.inf, tokens, NOT_FINITE)
            left = left[candidates.short]
            if not len(left):
                break
        return tokens_S

    def _keys(self, rows: SampledRows) -> Tensor:
        return noise_keys(rows.params["key"], rows.positions, self._device)


def _draw_greedy(logits_SV: Tensor, rows: SampledRows) -> Tensor:
    return _best(logits_SV)


def _best(scores_SV: Tensor) -> Tensor:
    """The id of each row's highest score, int64 [S]. The maximum of a row with NaN is NaN."""
    best = scores_SV.max(dim=-1)
    return torch.where(best.values < torch.inf, best.indices, NOT_FINITE)


def _parts(needs_S: np.ndarray) -> Iterator[np.ndarray]:
    """Numbers of the rows that draw alike: by how, and by whether anything changes their logits first."""
    kinds = (needs_S & (GREEDY | MASKED)) * 2 + ((needs_S & PROCESSED) != 0)
    if (kinds == kinds[:1]).all():
        if len(kinds):
            yield np.arange(len(kinds))
        return
    for kind in np.unique(kinds):
        yield np.flatnonzero(kinds == kind)


def slices(num_rows: int, row_size: int, num_entries: int) -> Iterator[slice]:
    """Consecutive rows of at most `num_entries` entries together, but at least one."""
    step = max(1, num_entries // row_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
