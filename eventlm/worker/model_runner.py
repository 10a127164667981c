"""Executes steps on a real model: the model, its KV cache and the sequences that it holds."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

from eventlm.events.decisions import Launched
from eventlm.models.config import read_config, resolve_dtype
from eventlm.models.loader import load_decoder, torch_dtype
from eventlm.models.rope import RopeTable
from eventlm.types import WorkerEnd
from eventlm.worker.batch import build_batch
from eventlm.worker.cache_engine import CacheEngine
from eventlm.worker.protocol import StepPayload, WorkerSetup
from eventlm.worker.sampler import SampledRow, sample
from eventlm.worker.sequence_table import Row, SequenceTable, end_of

StepTokens = tuple[list[list[int]], list[tuple[int, WorkerEnd]]]


class ModelRunner:
    """Runs the launches of one worker, in order. Raises CheckpointError if the model cannot be loaded."""

    def __init__(self, setup: WorkerSetup) -> None:
        if setup.threads > 0:
            torch.set_num_threads(setup.threads)
        self.setup = setup
        self.config = read_config(setup.model)
        self._device = torch.device("cpu")
        self._dtype = torch_dtype(resolve_dtype(self.config, setup.dtype))
        self._decoder = load_decoder(setup.model, dtype=setup.dtype, device=self._device.type)
        self._rope = RopeTable(self.config, setup.max_model_len, dtype=self._dtype, device=self._device)
        self.cache = CacheEngine(
            self.config,
            block_size=setup.block_size,
            num_blocks=setup.num_blocks,
            dtype=self._dtype,
            device=self._device,
        )
        self._table = SequenceTable(block_size=setup.block_size, num_blocks=setup.num_blocks)

    @torch.inference_mode()
    def execute(self, launch: Launched, payload: StepPayload) -> StepTokens:
        """The tokens of each row of the launch, and the ends among them as (row, why).

        Raises DesyncError, with nothing computed, if the launch disagrees with what the runner holds.
        """
        rows = self._table.apply(launch, payload)
        tokens: list[list[int]] = [[] for _ in rows]
        ends: list[tuple[int, WorkerEnd]] = []
        if rows:
            sampled_rows, logits_SV = self._logits(rows)
            draws = [_sampled_row(rows[number]) for number in sampled_rows]
            for number, token in zip(sampled_rows, sample(logits_SV, draws), strict=True):
                tokens[number] = [token]
                end = end_of(rows[number].sequence.params, token)
                if end is not None:
                    ends.append((number, end))
        self._table.record(rows, tokens)
        return tokens, ends

    def _logits(self, rows: list[Row]) -> tuple[list[int], Tensor]:
        """Numbers of the rows that sample, and their logits [S, V].

        Stores the keys and values of all rows.
        """
        batch = build_batch(rows, block_size=self.setup.block_size, device=self._device)
        self.cache.clear_slots(batch.tails_R)
        attention = self.cache.attention(batch.slots_T, batch.attention_rows)
        logits_SV = self._decoder(batch.token_ids_T, batch.positions_T, batch.sampled_S, self._rope, attention)
        return batch.sampled_rows, logits_SV

    def host_info(self) -> dict[str, Any]:
        """What a trace says of the machinery that computed it."""
        return {
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "device": str(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "attention_backend": "torch_sdpa_gather",
        }


def _sampled_row(row: Row) -> SampledRow:
    sequence = row.sequence
    return SampledRow(sequence.params, sequence.id.index, sequence.position)
