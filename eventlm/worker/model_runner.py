"""Executes steps on a real model: the model, its KV cache and the sequences that it holds."""

from __future__ import annotations

import platform
from functools import partial
from typing import Any

import numpy as np
import torch

from eventlm.events.decisions import Launched
from eventlm.models.config import resolve_dtype
from eventlm.models.decoder import no_lap
from eventlm.types import SequenceId, WorkerEnd
from eventlm.worker.checkpoint_runner import CheckpointRunner
from eventlm.worker.forward import make_cache, make_forward
from eventlm.worker.op_timer import OpTimer
from eventlm.worker.page_toucher import PageToucher
from eventlm.worker.protocol import RowExtras, StepOutput, StepPayload, WorkerSetup
from eventlm.worker.runner import ExecutedStep
from eventlm.worker.sampling.row_extras import row_extras
from eventlm.worker.sampling.sampler import NOT_FINITE, Sampler
from eventlm.worker.sequence_table import Row, SequenceTable, WorkerSequence
from eventlm.worker.start_report import READING_WEIGHTS, StartReport


class ModelRunner(CheckpointRunner):
    """Runs the launches of one worker, in order. Raises also CacheMemoryError, and UsageError as `make_forward`."""

    def __init__(self, setup: WorkerSetup, report: StartReport | None = None) -> None:
        if setup.threads > 0:
            torch.set_num_threads(setup.threads)
        super().__init__(setup, report)
        self.num_blocks = setup.num_blocks
        self.cache = make_cache(setup, self.config)
        self._pages = PageToucher(self.cache.stored)
        # Beside the reading of the weights; the first request must not wait for it.
        self._pages.begin()
        self.report.begin(READING_WEIGHTS)
        self._forward = make_forward(setup, self.config, self.cache, self.report.progress)
        self._pages.wait()
        self._table = SequenceTable(
            block_size=setup.block_size, num_blocks=setup.num_blocks, state_slots=setup.state_slots
        )
        self._sampler = Sampler(
            self.config.vocab_size,
            torch.device("cpu"),
            draw=self._forward.draw,
            draw_next=self._forward.draw_next,
        )

    def start(self, launch: Launched, payload: StepPayload) -> ExecutedStep:
        """As `execute`."""
        return ExecutedStep(lambda: self.execute(launch, payload))

    @torch.inference_mode()
    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """The tokens of each row of the launch, the ends among them as (row, why), and what else rows asked for.

        Raises DesyncError, with nothing computed, if the launch disagrees with what the runner holds.
        """
        timer = OpTimer() if self.setup.profile_ops else None
        rows = self._table.apply(launch, payload)
        self._pages.stay_ahead_of(self._table.num_blocks_used)
        for request, index in launch.forget:
            self._sampler.table.remove(SequenceId(request, index))
            self._grammars.remove(SequenceId(request, index))
        for new in payload.new:
            if new.kind == "generate":
                self._add(self._table[SequenceId(new.request, new.index)])
        tokens: list[list[int]] = [[] for _ in rows]
        extras: list[RowExtras] = []
        not_finite: set[int] = set()
        if rows:
            tokens, extras, not_finite = self._compute(rows, payload.forced, timer)
        ends = self._ends(rows, tokens, payload.forced, not_finite)
        self._table.record(rows, payload.forced or tokens)
        if timer:
            timer.lap("record")
        return StepOutput(tokens, ends, extras, timer.times_ns if timer is not None else {})

    def work_ahead(self) -> bool:
        """Have some memory given that later steps will use. False if there is enough."""
        return self._pages.touch_some()

    def _add(self, sequence: WorkerSequence) -> None:
        self._sampler.table.add(sequence)
        if sequence.params.grammar:
            self._grammars.add(sequence)

    def _ends(
        self, rows: list[Row], tokens: list[list[int]], forced: list[list[int]], not_finite: set[int]
    ) -> list[tuple[int, WorkerEnd]]:
        """The rows that end here: with the token that they drew, or with `error` if they are `not_finite`.

        Sequences with a grammar advance in it.
        """
        ends: list[tuple[int, WorkerEnd]] = []
        for number, (row, produced) in enumerate(zip(rows, tokens, strict=True)):
            if not produced:
                if number in not_finite:
                    ends.append((number, "error"))
                continue
            sequence, token_id = row.sequence, produced[-1]
            next_id = forced[number][-1] if forced and forced[number] else token_id
            if (end := self._end_of(sequence, token_id, next_id, sequence.position)) is not None:
                ends.append((number, end))
        return ends

    def _compute(
        self, rows: list[Row], forced: list[list[int]], timer: OpTimer | None
    ) -> tuple[list[list[int]], list[RowExtras], set[int]]:
        """Tokens, extras, and the rows that have neither: they are not finite. Stores the KV of all rows."""
        lap = partial(self._forward.lap, timer) if timer else no_lap
        sampled_rows = [number for number, row in enumerate(rows) if row.samples]
        sampled = [rows[number].sequence for number in sampled_rows]
        # While the model runs.
        masks = self._grammars.start(sampled)
        hidden_TH = self._forward.run(rows, timer)
        hidden_SH = hidden_TH
        if len(sampled_rows) < len(hidden_TH):
            ends_R = np.cumsum([row.num_tokens for row in rows])
            hidden_SH = hidden_TH[torch.from_numpy(ends_R[sampled_rows] - 1)]
        drawn, logits_SV = None, None
        if masks is None and not any(sequence.wants_extras for sequence in sampled):
            drawn = self._sampler.draw_next(hidden_SH, sampled)
        if drawn is None:
            logits_SV = self._forward.logits(hidden_SH)
            lap("lm_head")
            found = None
            if masks is not None:
                found = masks.result()
                lap("grammar")
            forced_S = None
            if forced:
                forced_S = np.array([forced[number][0] if forced[number] else NOT_FINITE for number in sampled_rows])
            drawn = self._sampler.sample(logits_SV, sampled, forced_S=forced_S, masks=found).tolist()
        lap("sample")
        extras, not_finite = row_extras(rows, sampled_rows, self._forward, hidden_TH, logits_SV, drawn)
        tokens: list[list[int]] = [[] for _ in rows]
        for number, token in zip(sampled_rows, drawn, strict=True):
            if token == NOT_FINITE:
                not_finite.add(number)
            elif number not in not_finite:
                tokens[number] = [token]
        lap("extras")
        return tokens, [each for each in extras if each.row not in not_finite], not_finite

    def host_info(self) -> dict[str, Any]:
        return {
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "device": "cpu",
            "dtype": resolve_dtype(self.config, self.setup.dtype, self.setup.quantization),
            "quantization": self.setup.quantization,
            "weight_bytes": self._forward.weight_bytes,
            "kv_token_bytes": self.cache.token_bytes,
            **self._forward.host,
        }
