"""Executes steps on a real model: the model, its KV cache and the sequences that it holds."""

from __future__ import annotations

import platform
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eventlm.events.decisions import Launched
from eventlm.kernels.cpu.native import MeetingEndedError
from eventlm.models.config import resolve_dtype
from eventlm.models.decoder import no_lap
from eventlm.types import SequenceId, WorkerEnd
from eventlm.worker.checkpoint_runner import CheckpointRunner
from eventlm.worker.forward import make_cache, make_forward
from eventlm.worker.op_timer import OpTimer
from eventlm.worker.page_toucher import PageToucher
from eventlm.worker.protocol import RowExtras, StepOutput, StepPayload, StepSample, WorkerSetup
from eventlm.worker.ranks.connect import Connections
from eventlm.worker.ranks.kv_group import GroupStep
from eventlm.worker.ranks.read_shards import read_shards
from eventlm.worker.ranks.stage import StageInput
from eventlm.worker.runner import AwaitedStep, ExecutedStep, PeerLostError, StepUnderWay, has_rows
from eventlm.worker.sampling.row_extras import compute_logits_of_extras, row_extras
from eventlm.worker.sampling.sampler import NOT_FINITE, Sampler
from eventlm.worker.sequence_table import Row, SequenceTable, WorkerSequence
from eventlm.worker.start_report import READING_WEIGHTS, StartReport


class ModelRunner(CheckpointRunner):
    """Runs the launches of one worker, in order. Raises also CacheMemoryError, and UsageError as `make_forward`.

    Of a replica that is split, it runs its part of each: a stage begins with what the one before hands over, and a
    stage that is not the last ends by handing over. In the last one tokens are drawn, by the rank that answers.
    """

    def __init__(self, setup: WorkerSetup, report: StartReport | None = None) -> None:
        if setup.threads > 0:
            torch.set_num_threads(setup.threads)
        super().__init__(setup, report)
        self.num_blocks = setup.num_blocks
        shards = read_shards(setup, self.config)
        self.cache = make_cache(setup, shards[setup.rank].model if shards else self.config)
        self._pages = PageToucher(self.cache.stored)
        # Beside the reading of the weights; the first request must not wait for it.
        self._pages.begin()
        connections = Connections(setup)
        self._exchange = connections.exchange(
            self.config.hidden_size, max((shard.model.vocab_size for shard in shards), default=0)
        )
        self._group = connections.kv_group(shards[setup.rank].model) if shards else None
        self.report.begin(READING_WEIGHTS)
        self._forward = make_forward(
            setup,
            self.config,
            self.cache,
            self.report.progress,
            shards=shards,
            exchange=self._exchange,
            group=self._group,
        )
        self._pages.wait()
        self._stage = connections.stage(self.config.hidden_size, self._forward.residual_dtype)
        self._is_answering = setup.rank == setup.layout.answering_rank
        #: Whether it has the logits that tokens are drawn from, or a part of them.
        self._is_drawing = self._stage.is_last and (self._group is None or self._group.number == 0)
        self._table = SequenceTable(
            block_size=setup.block_size,
            num_blocks=setup.num_blocks * setup.layout.groups,
            state_slots=setup.state_slots,
            own_blocks=self._group.own_blocks if self._group is not None else None,
        )
        self._sampler = Sampler(
            self.config.vocab_size,
            torch.device("cpu"),
            draw=self._forward.draw,
            draw_next=self._forward.draw_next,
        )

    @property
    def waits_for_peers(self) -> bool:
        """Whether a step waits for another rank of the replica."""
        exchanges = [self._exchange, self._group.exchange if self._group is not None else None]
        return self._stage.is_waiting or any(each.is_waiting for each in exchanges if each is not None)

    def start(self, launch: Launched, payload: StepPayload) -> StepUnderWay:
        """As `execute`, which begins once the stage before has handed the step over."""
        if self._stage.is_first:
            return ExecutedStep(lambda: self.execute(launch, payload))
        # One without rows has no input, but its turn.
        has_input = self._stage.has_input if has_rows(launch) else lambda: True
        return AwaitedStep(has_input, lambda: self.execute(launch, payload))

    def warm_up(self) -> list[StepSample]:
        """Time real steps, of this stage alone."""
        with self._stage.alone():
            return super().warm_up()

    @torch.inference_mode()
    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """The tokens of each row of the launch, the ends among them as (row, why), and what else rows asked for.

        Raises DesyncError, with nothing computed, if the launch disagrees with what the runner holds; PeerLostError.
        """
        rows = self._table.apply(launch, payload)
        own = self._group.share(rows) if self._group is not None else None
        num_tokens = launch.num_tokens if own is None else sum(row.num_tokens for row in own.rows)
        given = self._stage.begin(launch.step, num_tokens) if rows else StageInput()
        timer = OpTimer() if self.setup.profile_ops else None
        self._pages.stay_ahead_of(self._table.num_blocks_used)
        if self._is_drawing:
            self._update_tables(launch, payload)
        output = StepOutput([[] for _ in rows], [], [], {})
        try:
            if not self._stage.is_last:
                self._hand_over(launch.step, rows, given, payload.forced, timer, own)
            elif self._is_answering:
                output = self._answer(rows, given, payload.forced, timer, own)
            else:
                self._accompany(rows, given, payload.forced, own)
        except MeetingEndedError as error:
            raise PeerLostError(str(error)) from error
        if timer:
            timer.lap("record")
        stages = self._stage.times_ns(given) if rows else ()
        return output._replace(ops=timer.times_ns if timer is not None else {}, stages=list(stages))

    def work_ahead(self) -> bool:
        """Touch some memory that later steps will use. False if there is enough."""
        return self._pages.touch_some()

    def _update_tables(self, launch: Launched, payload: StepPayload) -> None:
        """What is drawn from, for the sequences that come and go."""
        for request, index in launch.forget:
            self._sampler.table.remove(SequenceId(request, index))
            self._grammars.remove(SequenceId(request, index))
        for new in payload.new:
            if new.kind != "generate":
                continue
            sequence = self._table[SequenceId(new.request, new.index)]
            # Where all ranks of a stage draw together, each knows how.
            if self._is_answering or self._forward.draw_next is not None:
                self._sampler.table.add(sequence)
            if self._is_answering and sequence.params.grammar:
                self._grammars.add(sequence)

    def _run(self, rows: list[Row], given: StageInput, timer: OpTimer | None, own: GroupStep | None) -> Tensor:
        """The residual stream after this stage's last layer, of the rows that this rank computes.

        In the last stage, where tokens are drawn, it is that of all rows, as far as it is wanted.
        """
        if own is None or self._group is None:
            return self._forward.run(rows, timer, given.residual_TH)
        if own.own or own.num_shared:
            hidden_TH = self._forward.run(own.rows, timer, given.residual_TH, own)
        else:
            hidden_TH = torch.empty(0, self.config.hidden_size, dtype=self._forward.residual_dtype)
        return self._group.gather_hidden(rows, own, hidden_TH) if self._stage.is_last else hidden_TH

    def _hand_over(
        self,
        step: int,
        rows: list[Row],
        given: StageInput,
        forced: list[list[int]],
        timer: OpTimer | None,
        own: GroupStep | None,
    ) -> None:
        """A step of a stage that is not the last. Its tokens come later, unless they are `forced`."""
        if rows:
            self._stage.end(step, given, self._run(rows, given, timer, own))
        if forced:
            self._table.record(rows, forced)
        else:
            self._table.expect_results(step, rows)

    def _answer(
        self,
        rows: list[Row],
        given: StageInput,
        forced: list[list[int]],
        timer: OpTimer | None,
        own: GroupStep | None,
    ) -> StepOutput:
        """A step of the last stage, on the rank that draws."""
        tokens: list[list[int]] = [[] for _ in rows]
        extras: list[RowExtras] = []
        not_finite: set[int] = set()
        if rows:
            tokens, extras, not_finite = self._compute(rows, given, forced, timer, own)
        ends = self._ends(rows, tokens, forced, not_finite)
        self._table.record(rows, forced or tokens)
        return StepOutput(tokens, ends, extras, {})

    def _accompany(self, rows: list[Row], given: StageInput, forced: list[list[int]], own: GroupStep | None) -> None:
        """A step of the last stage, on a rank that does not answer it."""
        tokens: list[list[int]] = [[] for _ in rows]
        if rows:
            hidden_TH = self._run(rows, given, None, own)
            sampled_rows = [number for number, row in enumerate(rows) if row.samples]
            if self._is_drawing:
                drawn = self._draw_along(rows, sampled_rows, hidden_TH)
            else:
                drawn = [NOT_FINITE] * len(sampled_rows)
            if self._group is not None:
                drawn = self._group.tell(drawn)
            for number, token in zip(sampled_rows, drawn, strict=True):
                tokens[number] = [token] if token != NOT_FINITE else []
        self._table.record(rows, forced or tokens)

    def _draw_along(self, rows: list[Row], sampled_rows: list[int], hidden_TH: Tensor) -> list[int]:
        """What the answering rank draws, on a rank that has a part of the logits, and no more to do with them."""
        sampled = [rows[number].sequence for number in sampled_rows]
        hidden_SH = _last_of(rows, sampled_rows, hidden_TH)
        drawn = None if _need_logits(sampled) else self._sampler.draw_next(hidden_SH, sampled)
        needs_telling = drawn is None
        if drawn is None:
            self._forward.logits(hidden_SH)
            drawn = [NOT_FINITE] * len(sampled)
        compute_logits_of_extras(rows, self._forward, hidden_TH)
        return self._tell(drawn) if needs_telling else drawn

    def _tell(self, drawn: list[int]) -> list[int]:
        """What the answering rank has drawn, on all tensor ranks of the last stage."""
        if self._exchange is None:
            return drawn
        told: list[int] = self._exchange.gather(torch.tensor(drawn, dtype=torch.int64))[0].tolist()
        return told

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
        self,
        rows: list[Row],
        given: StageInput,
        forced: list[list[int]],
        timer: OpTimer | None,
        own: GroupStep | None,
    ) -> tuple[list[list[int]], list[RowExtras], set[int]]:
        """Tokens, extras, and the rows that have neither: they are not finite. Stores the KV of all rows."""
        lap = partial(self._forward.lap, timer) if timer else no_lap
        sampled_rows = [number for number, row in enumerate(rows) if row.samples]
        sampled = [rows[number].sequence for number in sampled_rows]
        # While the model runs.
        masks = self._grammars.start(sampled)
        hidden_TH = self._run(rows, given, timer, own)
        hidden_SH = _last_of(rows, sampled_rows, hidden_TH)
        drawn, logits_SV = None, None
        if not _need_logits(sampled):
            drawn = self._sampler.draw_next(hidden_SH, sampled)
        needs_telling = drawn is None
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
        told = [tokens[number][0] if tokens[number] else NOT_FINITE for number in sampled_rows]
        if needs_telling:
            self._tell(told)
        if self._group is not None:
            self._group.tell(told)
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


def _last_of(rows: list[Row], numbers: list[int], hidden_TH: Tensor) -> Tensor:
    """The hidden states of the last token of each of these rows, [S, H]."""
    if len(numbers) == len(hidden_TH):
        return hidden_TH
    ends_R = np.cumsum([row.num_tokens for row in rows])
    return hidden_TH[torch.from_numpy(ends_R[numbers] - 1)]


def _need_logits(sampled: list[WorkerSequence]) -> bool:
    """Whether more is wanted of the logits of some than tokens as the model gives them."""
    return any(sequence.wants_extras or sequence.params.grammar for sequence in sampled)
