"""Executes steps on a GPU, several under way at a time.

A step is staged, copied and launched while the one before runs. Its decodes need not know their tokens: those are on
the device, after the sampling of the step before. If the host needs them first (for a grammar, say), the
forward pass is launched all the same, and waits with the sampling alone.
"""

from __future__ import annotations

import platform
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eventlm.events.decisions import Launched
from eventlm.models.config import resolve_dtype
from eventlm.models.decoder import Lap
from eventlm.types import SequenceId, WorkerEnd
from eventlm.worker.checkpoint_runner import CheckpointRunner
from eventlm.worker.gpu.device import Mark, clear_errors, describe_device, open_device
from eventlm.worker.gpu.forward import GpuForward
from eventlm.worker.gpu.memory import GpuMemory, size_cache
from eventlm.worker.gpu.sampler import GpuSampler
from eventlm.worker.gpu.step import GpuStep
from eventlm.worker.gpu.step_inputs import Sampled, StepInputs
from eventlm.worker.op_timer import OpTimer
from eventlm.worker.protocol import StepOutput, StepPayload, WorkerSetup
from eventlm.worker.runner import StepUnderWay
from eventlm.worker.sampling.row_extras import row_extras
from eventlm.worker.sampling.sampler import NOT_FINITE
from eventlm.worker.sampling.sampling_table import SampledRows
from eventlm.worker.sequence_table import DesyncError, SequenceTable, WorkerSequence
from eventlm.worker.start_report import READING_WEIGHTS, StartReport


class GpuRunner(CheckpointRunner):
    """Runs the launches of one worker, in order.

    Raises also CacheMemoryError if the model does not fit, and GpuError, as each step does, where the GPU fails, is
    full, or a kernel does not compile for it.
    """

    #: Whether it draws tokens; where it does not, another rank does.
    _is_drawing = True

    def __init__(self, setup: WorkerSetup, report: StartReport | None = None) -> None:
        super().__init__(setup, report)
        self.report.begin(READING_WEIGHTS)
        self.device = open_device(setup.device)
        with clear_errors(self.device):
            self.forward = self._make_forward()
        self.cache = self.forward.cache
        self._sampler = GpuSampler(self.config.vocab_size, self.device)
        self._slots: dict[SequenceId, int] = {}
        self._free_slots = list(range(self.forward.num_slots))
        #: Those whose tokens have not been taken in, in order.
        self._unsettled: deque[GpuStep] = deque()
        #: When the last of the others ended.
        self._ended_ns = 0
        self._turn = 0
        with clear_errors(self.device):
            self._host_tokens = [
                torch.zeros(setup.max_num_seqs, dtype=torch.int32, pin_memory=self.device.type == "cuda")
                for _ in range(setup.max_steps_in_flight + 1)
            ]
            self._memory = self._size_cache()
        self.num_blocks = self._memory.num_blocks

    def _make_forward(self) -> GpuForward:
        return GpuForward(self.setup, self.config, self.device, self.report.progress)

    def _size_cache(self) -> GpuMemory:
        return size_cache(self, self.report)

    def agree(self, num_blocks: int) -> int:
        """KV blocks for which there is room on all ranks that run the same steps, if there is for so many here."""
        return num_blocks

    def open_table(self, num_blocks: int) -> None:
        """Begin with a cache of so many empty blocks and no sequences."""
        self.forward.resize_cache(num_blocks)
        self._table = SequenceTable(block_size=self.setup.block_size, num_blocks=num_blocks)

    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        return self.start(launch, payload).finish()

    def start(self, launch: Launched, payload: StepPayload) -> StepUnderWay:
        """Launch a step. Raises DesyncError, with nothing launched, if it disagrees with what the runner holds."""
        return self._begin(launch, payload)

    @torch.inference_mode()
    def _begin(self, launch: Launched, payload: StepPayload, residual_TH: Tensor | None = None) -> GpuStep:
        """residual_TH: what the stage before has given, if there is one."""
        timer = OpTimer() if self.setup.profile_ops else None
        rows = self._table.apply(launch, payload)
        self._forget_and_add(launch, payload)
        numbers = [number for number, row in enumerate(rows) if row.samples]
        forced = None
        if payload.forced:
            forced = [payload.forced[number][0] if payload.forced[number] else NOT_FINITE for number in numbers]
        with clear_errors(self.device):
            step = GpuStep(rows, numbers, forced, Mark(self.device), self._settle)
            drawn = self._launch(step, launch, timer, residual_TH) if rows else None
            self._table.expect(rows)
            step.launched(drawn, Mark(self.device))
        step.ops = timer.times_ns if timer is not None else {}
        self._unsettled.append(step)
        return step

    def _forget_and_add(self, launch: Launched, payload: StepPayload) -> None:
        if any(self._grammars.has(SequenceId(request, index)) for request, index in launch.forget):
            # A token under way may be its end.
            self._settle_all()
        for request, index in launch.forget:
            identity = SequenceId(request, index)
            slot = self._slots.pop(identity, None)
            if slot is not None:
                self._free_slots.append(slot)
            self._sampler.table.remove(identity)
            self._grammars.remove(identity)
        for new in payload.new:
            sequence = self._table[SequenceId(new.request, new.index)]
            if not self._free_slots:
                raise DesyncError(f"more than {self.forward.num_slots} sequences are held at once")
            sequence.slot = self._slots[sequence.id] = self._free_slots.pop()
            if new.kind == "generate" and self._is_drawing:
                self._sampler.table.add(sequence)
                if sequence.params.grammar:
                    self._grammars.add(sequence)

    def _launch(
        self, step: GpuStep, launch: Launched, timer: OpTimer | None, residual_TH: Tensor | None
    ) -> Tensor | None:
        """Everything that the device has to do; where its tokens will be. Waits only where a row's needs force it."""
        lap = self._lap(timer)
        numbers, sequences = step.numbers, step.sequences
        staged = self._sampler.stage(sequences)
        inputs = self.forward.stage(
            step.rows,
            launch.blocks,
            Sampled(numbers, staged.draws, step.forced),
            num_decodes=len(launch.decodes),
            bucket=launch.bucket,
        )
        self.forward.staging.send()
        hidden_TH = self.forward.run(step.rows, inputs, bucket=launch.bucket, lap=lap, residual_TH=residual_TH)
        logits_SV = drawn_S = None
        if sequences:
            hidden_SH = hidden_TH if len(numbers) == len(hidden_TH) else hidden_TH[inputs.sampled]
            logits_SV = self.forward.logits(hidden_SH)
            if lap:
                lap("lm_head")
            drawn_S = self._draw(logits_SV, sequences, staged.rows, inputs)
        if any(row.sequence.wants_extras for row in step.rows):
            drawn = drawn_S.tolist() if drawn_S is not None else []
            step.extras, step.not_finite = row_extras(step.rows, numbers, self.forward, hidden_TH, logits_SV, drawn)
        found = None
        if drawn_S is not None:
            found = self._room_for_tokens()[: len(sequences)]
            found.copy_(drawn_S, non_blocking=True)
        if lap:
            lap("sample")
        return found

    def _draw(
        self, logits_SV: Tensor, sequences: list[WorkerSequence], rows: SampledRows, inputs: StepInputs
    ) -> Tensor:
        """A token for each, int32 [S], which is its sequence's last one from here on."""
        masks = None
        if self._sampler.needs_history(sequences):
            self._settle_all()
            started = self._grammars.start(sequences)
            masks = started.result() if started is not None else None
        drawn_S = self._sampler.draw(logits_SV, rows, inputs.params, masks=masks)
        next_S = drawn_S if inputs.forced is None else inputs.forced
        self.forward.last_tokens[inputs.sampled_slots] = next_S
        return drawn_S

    def _room_for_tokens(self) -> Tensor:
        """Memory of the host that no step under way writes to."""
        while len(self._unsettled) >= len(self._host_tokens):
            self._unsettled[0].settle()
        self._turn = (self._turn + 1) % len(self._host_tokens)
        return self._host_tokens[self._turn]

    def _settle_all(self) -> None:
        while self._unsettled:
            self._unsettled[0].settle()

    def _settle(self, step: GpuStep, drawn: list[int]) -> StepOutput:
        """A step's tokens are there, those of the steps before it have been taken in."""
        while self._unsettled[0] is not step:
            self._unsettled[0].settle()
        self._unsettled.popleft()
        step.note_times(self._ended_ns)
        self._ended_ns = step.times_ns[1]
        following = step.forced or drawn
        tokens: list[list[int]] = [[] for _ in step.rows]
        not_finite = {number for number, token in zip(step.numbers, drawn, strict=True) if token == NOT_FINITE}
        not_finite |= step.not_finite
        ends: list[tuple[int, WorkerEnd]] = [(number, "error") for number in sorted(not_finite)]
        for number, sequence, position, token_id, next_id in zip(
            step.numbers, step.sequences, step.positions, drawn, following, strict=True
        ):
            if number in not_finite:
                continue
            if next_id == NOT_FINITE:  # of the recorded step, where this one is finite
                next_id = token_id
            tokens[number] = [token_id]
            sequence.token_ids[position] = next_id
            end = self._end_of(sequence, token_id, next_id, position - sequence.num_prompt_tokens)
            if end is not None:
                ends.append((number, end))
        self._record(step, following)
        return StepOutput(tokens, ends, [each for each in step.extras if each.row not in not_finite], step.ops)

    def _record(self, step: GpuStep, following: list[int]) -> None:
        """Count the tokens of those sequences that are still held, if counts matter to any."""
        if self._sampler.needs_history(step.sequences):
            pairs = zip(step.sequences, following, strict=True)
            held = [(each, token) for each, token in pairs if self._slots.get(each.id) == each.slot]
            self._sampler.record([each for each, _ in held], np.array([token for _, token in held], dtype=np.int64))

    def work_ahead(self) -> bool:
        """There is nothing to do: a GPU's memory is there when it is given."""
        return False

    def _lap(self, timer: OpTimer | None) -> Lap | None:
        """Waits for the device at the end of each operation, which makes the step slower."""
        if timer is None:
            return None

        def lap(name: str) -> None:
            Mark(self.device).wait()
            timer.lap(name)

        return lap

    def host_info(self) -> dict[str, Any]:
        return {
            "torch": str(torch.__version__),
            "machine": platform.machine(),
            "device": self.setup.device,
            "dtype": resolve_dtype(self.config, self.setup.dtype, self.setup.quantization),
            "weight_bytes": self.forward.weight_bytes,
            "kv_token_bytes": self.cache.token_bytes,
            "memory": self._memory._asdict(),
            **describe_device(self.device),
            **self.forward.host,
        }
