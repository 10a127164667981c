"""Picks the next token of each row on a GPU: what `Sampler` does, by kernels, with nothing that waits for the GPU.

How a row draws depends on its sequence's parameters and position in the output alone, so that it can be sent before the
token before is known; `GpuSampler.needs_history` finds the sequences for which that does not hold.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eventlm.kernels.gpu.draw_masked import draw_masked
from eventlm.kernels.gpu.draw_tokens import DRAW_COLUMNS, draw_tokens
from eventlm.kernels.gpu.penalties import apply_penalties
from eventlm.worker.sampling.logits_processors import process_logits
from eventlm.worker.sampling.noise import step_keys
from eventlm.worker.sampling.sampler import SLICE_ENTRIES, slices
from eventlm.worker.sampling.sampling_table import GREEDY, MASKED, PROCESSED, SampledRows, SamplingTable, to_device
from eventlm.worker.sampling.vocabulary_masks import Masks
from eventlm.worker.sequence_table import WorkerSequence


class StagedDraws(NamedTuple):
    """Rows of sequences, and what kernels must know of how they draw: int32 [S, 6], `draw_tokens.DRAW_COLUMNS`."""

    rows: SampledRows
    draws: np.ndarray


class GpuSampler:
    """Draws for the sequences in its table. The tokens stay on the device, where the next step may need them first."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.table = SamplingTable(vocab_size)
        self._device = device

    def needs_history(self, sequences: Sequence[WorkerSequence]) -> bool:
        """Whether one of them cannot be drawn for before the host knows all of its tokens."""
        return self.table.needs_history(sequences)

    def stage(self, sequences: Sequence[WorkerSequence]) -> StagedDraws:
        """How these different sequences draw their next token."""
        rows = self.table.rows(sequences)
        params = rows.params
        draws = np.empty((len(params), len(DRAW_COLUMNS)), dtype=np.int32)
        draws[:, 0] = np.where(params["needs"] & GREEDY, np.float32(0.0), params["temperature"]).view(np.int32)
        draws[:, 1:3] = step_keys(params["key"], rows.positions)
        draws[:, 3] = params["top_k"]
        draws[:, 4] = params["top_p"].astype(np.float32).view(np.int32)
        draws[:, 5] = params["log_min_p"].view(np.int32)
        return StagedDraws(rows, draws)

    def draw(self, logits_SV: Tensor, rows: SampledRows, draws_S6: Tensor, *, masks: Masks | None = None) -> Tensor:
        """One token id for each of the sequences that were staged, or NOT_FINITE, int32 [S], on the device.

        logits_SV: any floating dtype, not changed. draws_S6: what was staged, on the device. masks: of those with a
        grammar. Nothing is copied from the host unless a sequence has its logits changed.
        """
        if masks is not None:
            rows = rows.masked(masks)
        tokens_S = torch.empty(len(logits_SV), dtype=torch.int32, device=self._device)
        processed = np.flatnonzero(rows.params["needs"] & PROCESSED)
        if len(processed) < len(logits_SV):
            _draw(logits_SV, rows, draws_S6, tokens_S)
        for span in slices(len(processed), logits_SV.shape[1], SLICE_ENTRIES):
            part = rows.take(processed[span])
            numbers = to_device(processed[span], self._device)
            logits = logits_SV[numbers].to(torch.float32)
            process_logits(logits, part, self.table, penalize=_penalize)
            drawn = torch.empty(len(numbers), dtype=torch.int32, device=self._device)
            _draw(logits, part, draws_S6[numbers], drawn)
            tokens_S[numbers] = drawn
        return tokens_S

    def record(self, sequences: Sequence[WorkerSequence], tokens_S: np.ndarray) -> None:
        """Count the tokens that these go on with, int64 [S], once the host knows them."""
        if self.needs_history(sequences):
            self.table.record(self.table.rows(sequences), tokens_S)


def _draw(logits_SV: Tensor, rows: SampledRows, draws_S6: Tensor, out_S: Tensor) -> None:
    if (rows.params["needs"] & MASKED).any():
        draw_masked(logits_SV, draws_S6, out_S)
    else:
        draw_tokens(logits_SV, draws_S6, out_S)


def _penalize(logits_SV: Tensor, rows: SampledRows, numbers: np.ndarray, table: SamplingTable) -> None:
    """See `logits_processors.Penalize`. All goes to the device in one copy."""
    params = rows.params[numbers]
    seen = table.counts.take(params["counts_row"])
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    penalties = np.stack([params[name] for name in names], axis=1).view(np.int32)
    packed = np.concatenate((numbers[:, None], penalties, seen.ids, seen.counts), axis=1, dtype=np.int32)
    packed_RW = to_device(packed, logits_SV.device)
    rows_R1, penalties_R3, ids_RN, counts_RN = packed_RW.split([1, 3, seen.ids.shape[1], seen.ids.shape[1]], dim=1)
    apply_penalties(logits_SV, rows_R1[:, 0], penalties_R3.view(torch.float32), ids_RN, counts_RN)
