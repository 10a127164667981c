"""Executes a rank's part of steps on a GPU: a preview.

Tensor ranks of a stage all draw the tokens, from the same logits. A stage hands over by way of the host, so it waits
for its device in each step, and no CUDA graphs are captured.
"""

from __future__ import annotations

import numpy as np
import torch

from eventlm.events.decisions import Launched
from eventlm.kernels.gpu.draw_tokens import DRAW_COLUMNS
from eventlm.worker.gpu.device import clear_errors
from eventlm.worker.gpu.forward import GpuForward
from eventlm.worker.gpu.memory import GpuMemory
from eventlm.worker.gpu.partial_weights import GpuPart
from eventlm.worker.gpu.rank_exchange import gpu_exchange
from eventlm.worker.gpu.runner import GpuRunner
from eventlm.worker.gpu.step_inputs import Sampled
from eventlm.worker.op_timer import OpTimer
from eventlm.worker.protocol import StepOutput, StepPayload, StepSample
from eventlm.worker.ranks.connect import Connections
from eventlm.worker.ranks.read_shards import read_shards
from eventlm.worker.ranks.stage import StageInput
from eventlm.worker.runner import AwaitedStep, ExecutedStep, StepUnderWay, has_rows

_NOTHING_SAMPLED = Sampled([], np.empty((0, len(DRAW_COLUMNS)), dtype=np.int32), None)


class GpuRankRunner(GpuRunner):
    """Runs the launches of one rank, in order. Raises also PeerLostError."""

    def _make_forward(self) -> GpuForward:
        setup, hidden_size = self.setup, self.config.hidden_size
        connections = Connections(setup)
        shards = read_shards(setup, self.config)
        most_rows = max(shard.model.vocab_size for shard in shards)
        self._exchange = gpu_exchange(connections, hidden_size, most_rows, self.device)
        part = GpuPart(shards[setup.rank], self._exchange)
        forward = GpuForward(setup, self.config, self.device, self.report.progress, part)
        self._stage = connections.stage(hidden_size, forward.dtype)
        self._is_drawing = self._stage.is_last
        return forward

    def _size_cache(self) -> GpuMemory:
        with self._stage.alone():
            return super()._size_cache()

    def agree(self, num_blocks: int) -> int:
        if self._exchange is None:
            return num_blocks
        return int(self._exchange.gather(torch.tensor([num_blocks], device=self.device)).min())

    @property
    def waits_for_peers(self) -> bool:
        return self._stage.is_waiting or (self._exchange is not None and self._exchange.is_waiting)

    def warm_up(self) -> list[StepSample]:
        """Time real steps, of this stage alone."""
        with self._stage.alone():
            return super().warm_up()

    def start(self, launch: Launched, payload: StepPayload) -> StepUnderWay:
        """As `GpuRunner.start`. Of several stages each executes a step at once, when the one before has given it."""
        if self._stage.is_first and self._stage.is_last:
            return self._begin(launch, payload)
        if self._stage.is_first:
            return ExecutedStep(lambda: self.execute(launch, payload))
        # One without rows has no input, but its turn.
        has_input = self._stage.has_input if has_rows(launch) else lambda: True
        return AwaitedStep(has_input, lambda: self.execute(launch, payload))

    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        return self._answer(launch, payload) if self._stage.is_last else self._hand_over(launch, payload)

    def _answer(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """A step of the last stage."""
        given = self._given(launch)
        output = self._begin(launch, payload, given.residual_TH).finish()
        return output._replace(stages=list(self._stage.times_ns(given)) if has_rows(launch) else [])

    @torch.inference_mode()
    def _hand_over(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """A step of a stage that is not the last. Its tokens come later, unless they are forced."""
        given = self._given(launch)
        timer = OpTimer() if self.setup.profile_ops else None
        rows = self._table.apply(launch, payload)
        self._forget_and_add(launch, payload)
        if rows:
            with clear_errors(self.device):
                inputs = self.forward.stage(
                    rows, launch.blocks, _NOTHING_SAMPLED, num_decodes=len(launch.decodes), bucket=launch.bucket
                )
                self.forward.staging.send()
                hidden_TH = self.forward.run(
                    rows, inputs, bucket=launch.bucket, lap=self._lap(timer), residual_TH=given.residual_TH
                ).cpu()
            self._stage.end(launch.step, given, hidden_TH)
        if payload.forced:
            self._table.record(rows, payload.forced)
        else:
            self._table.expect_results(launch.step, rows)
        return StepOutput([[] for _ in rows], [], [], timer.times_ns if timer is not None else {})

    def _given(self, launch: Launched) -> StageInput:
        """What a step begins with, on the device."""
        if not has_rows(launch):
            return StageInput()
        given = self._stage.begin(launch.step, launch.num_tokens)
        if given.residual_TH is not None:
            given.residual_TH = given.residual_TH.to(self.device)
        return given
