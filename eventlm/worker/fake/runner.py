"""A worker without a model: tokens are hashes, times come from a formula, and it can do all that a real one may do.

A token depends on its request's seed, the sample's index and its position alone, or with recurrent layers on the tokens
before it; so it is the same in whatever batch, on whatever replica, before and after a preemption. Rows of several
tokens (speculation) produce between none and all that the launch allows. The text is valid UTF-8 of words of a fixed
length, some with characters of several bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventlm.core.shards import Layout
from eventlm.errors import EventLMError
from eventlm.events import Launched
from eventlm.types import SequenceId, WorkerEnd
from eventlm.worker.fake.extras import fake_extras
from eventlm.worker.fake.kv_content import KvContent
from eventlm.worker.fake.rank import FakeRank
from eventlm.worker.fake.states import FakeStates
from eventlm.worker.fake.tokens import (
    ENDS,
    EOS_TOKEN_ID,
    MILLION,
    FakeParameters,
    draw,
    fake_token,
    poisoned_place,
    state_token,
)
from eventlm.worker.protocol import RowExtras, StepOutput, StepPayload
from eventlm.worker.sequence_table import Row, SequenceTable, WorkerSequence, end_of

if TYPE_CHECKING:
    from eventlm.worker.fake.grammar import FakeGrammars


class FakeDeath(Exception):
    """The worker dies here."""


class FakeHang(Exception):
    """The step never ends."""


_FAULTS: dict[str, type[Exception]] = {"die": FakeDeath, "raise": EventLMError, "hang": FakeHang}


class FakeRunner:
    """Executes launches as a model runner does. Raises DesyncError like one and where blocks do not hold the context of
    a row, and what its `FakeRank` does.
    """

    def __init__(
        self,
        parameters: dict[str, Any] | FakeParameters,
        *,
        epoch: int,
        block_size: int,
        num_blocks: int,
        state_slots: int = 0,
        layout: Layout | None = None,
        rank: int = 0,
    ) -> None:
        if not isinstance(parameters, FakeParameters):
            parameters = FakeParameters(**parameters)
        self.parameters = parameters
        self._epoch = epoch
        self._rank = FakeRank(layout or Layout(), rank)
        self._table = SequenceTable(block_size=block_size, num_blocks=num_blocks, state_slots=state_slots)
        self._kv = KvContent(block_size)
        self._states = FakeStates(state_slots) if parameters.recurrent else None
        #: None as long as no sequence has a grammar: most runs load no llguidance.
        self._grammars: FakeGrammars | None = None

    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """Compute every row of a launch. It takes as long as the operations of the output together."""
        self._rank.take_results(launch, payload)
        rows = self._table.apply(launch, payload)
        self._rank.check_rows(launch)
        self._kv.compute(launch, rows)
        self._update_grammars(launch, payload)
        self._suffer(launch)
        tokens: list[list[int]] = []
        ends: list[tuple[int, WorkerEnd]] = []
        extras: list[RowExtras] = []
        for number, row in enumerate(rows):
            if row.samples and self._is_deadly(row.sequence):
                self._rank.check_fault("poison", row.sequence.params.noise_seed, row.sequence.id.index)
                raise FakeDeath(f"poisoned by sequence {row.sequence.id}")
            most = launch.most[number] if launch.most else int(row.samples)
            forced = payload.forced[number] if payload.forced else None
            state = None if self._states is None else self._states.advance(row)
            produced, reason = self._produce(row, launch.step, most if row.samples else 0, forced, state)
            tokens.append(produced)
            if reason is not None:
                ends.append((number, reason))
            if (beside := fake_extras(number, row, produced, draw)) is not None:
                extras.append(beside)
        self._table.record(rows, payload.forced or tokens)
        if launch.most or payload.forced:
            self._kv.accept(rows, payload.forced or tokens)
        self._rank.note(launch.step, rows, payload.forced or tokens)
        return StepOutput(tokens, ends, extras, self._ops(launch, rows))

    def _suffer(self, launch: Launched) -> None:
        """Die, fail or hang if that is drawn."""
        parameters, where = self.parameters, (self._epoch, launch.replica, launch.step)
        for name, ppm in (("die", parameters.die_ppm), ("raise", parameters.raise_ppm), ("hang", parameters.hang_ppm)):
            if ppm and self._draw(name, *where) < ppm:
                self._rank.check_fault(name, *where)
                raise _FAULTS[name](f"drawn to {name} in step {launch.step}")

    def _is_deadly(self, sequence: WorkerSequence) -> bool:
        index = poisoned_place(self.parameters, sequence.params.noise_seed, sequence.id.index)
        return index is not None and sequence.position >= index

    def _update_grammars(self, launch: Launched, payload: StepPayload) -> None:
        if self._grammars is not None:
            for request, index in launch.forget:
                self._grammars.remove(SequenceId(request, index))
        for new in payload.new:
            if new.params.grammar and new.kind == "generate":
                if self._grammars is None:
                    from eventlm.worker.fake.grammar import FakeGrammars

                    self._grammars = FakeGrammars()
                self._grammars.add(self._table[SequenceId(new.request, new.index)])

    def _produce(
        self, row: Row, step: int, most: int, forced: list[int] | None, state: int | None
    ) -> tuple[list[int], WorkerEnd | None]:
        """0 to `most` tokens, cut after the first end. A row that may produce one always does. state: that of recurrent
        layers after the row.
        """
        sequence = row.sequence
        params, index, position = sequence.params, sequence.id.index, sequence.position
        count = most if most <= 1 else self._draw("count", params.noise_seed, step, position) % (most + 1)
        if params.grammar and self._grammars is not None:
            return self._grammars.produce(row, count, forced)
        produced: list[int] = []
        for slot in range(position, position + count):
            nan_ppm = self.parameters.nan_ppm
            if nan_ppm and self._draw("nan", params.noise_seed, index, slot) < nan_ppm:
                # An `error` of this kind comes without a token: with some, the next step ends the sequence.
                return produced, None if produced else "error"
            drawn = self._draw("end", params.noise_seed, index, slot)
            if drawn < self.parameters.end_ppm and slot >= params.min_tokens and not params.ignore_eos:
                produced.append(EOS_TOKEN_ID)
                return produced, ENDS[drawn % len(ENDS)]
            if state is not None:
                produced.append(state_token(params.noise_seed, index, state))
            else:
                produced.append(fake_token(params.noise_seed, index, slot, piece_ppm=self.parameters.piece_ppm))
            if (reason := end_of(params, produced[-1], slot)) is not None:
                return produced, reason
        return produced, None

    def _ops(self, launch: Launched, rows: list[Row]) -> dict[str, int]:
        """The step's time by what it is spent on."""
        parameters, num_decodes = self.parameters, len(launch.decodes)
        late = self._draw("late", self._epoch, launch.replica, launch.step) < parameters.late_ppm
        ops = {
            "base": parameters.base_ns,
            "prefill": parameters.prefill_token_ns * (launch.num_tokens - num_decodes),
            "decode": parameters.decode_ns * num_decodes,
            "context": parameters.context_token_ns * sum(row.start + row.num_tokens for row in rows),
        }
        return {name: time_ns * (parameters.late_factor if late else 1) for name, time_ns in ops.items()}

    def _draw(self, *what: int | str) -> int:
        return draw(*what) % MILLION
