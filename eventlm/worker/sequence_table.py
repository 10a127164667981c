"""What a worker holds of each sequence: tokens, block table, and how long it was after each of its steps.

A launch names sequences, lengths and blocks; the ids of new sequences come beside it. `SequenceTable.apply`
folds both in and returns the rows to compute, `SequenceTable.record` folds in what they produced. Launches
arrive in order and may run ahead of what the engine has confirmed, so a launch says how long a sequence was
when it was made and how many of its steps were under way then; the table looks up how long it was itself at
that point. Any disagreement is a `DesyncError`, after which nothing that this table says may be trusted.

Where another rank samples, the tokens of a step come beside a later launch: `SequenceTable.expect_results` in place of
`record`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from eventlm.events.decisions import Launched
from eventlm.sampling_params import SamplingParams
from eventlm.types import SequenceId, WorkerEnd, ceil_div
from eventlm.worker.protocol import NewSequence, StepPayload

if TYPE_CHECKING:
    from torch import Tensor


class DesyncError(Exception):
    """The launch and the worker disagree on a sequence. The message names it and both views."""


class WorkerSequence:
    """One sequence of a worker: tokens that the engine has not confirmed yet are among `token_ids`."""

    __slots__ = (
        "block_table",
        "hidden_sum_H",
        "id",
        "kind",
        "lacks_token",
        "lengths",
        "num_prompt_tokens",
        "params",
        "slot",
        "state_slot",
        "token_ids",
        "wants_extras",
    )

    def __init__(self, new: NewSequence) -> None:
        self.id = SequenceId(new.request, new.index)
        self.token_ids = list(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.params = new.params
        self.kind = new.kind
        #: Whether a step gives anything for it beside tokens.
        self.wants_extras = (
            new.kind != "generate" or new.params.logprobs is not None or new.params.prompt_logprobs is not None
        )
        #: Of the prompt tokens computed so far, where their mean is wanted; float64.
        self.hidden_sum_H: Tensor | None = None
        #: Where a GPU has its block table and its last token; -1 elsewhere.
        self.slot = -1
        #: Where the states of recurrent layers are kept; -1 before its first row, and without such layers.
        self.state_slot = -1
        #: Whether a row gave no token where launches may count on one. The sequence ends by it.
        self.lacks_token = False
        #: Block numbers by index, 32-bit.
        self.block_table = array("i")
        #: Length at its start and after each executed step, less what no later launch can ask for.
        self.lengths = [len(self.token_ids)]

    @property
    def position(self) -> int:
        """Place in the output of the next token, from 0."""
        return len(self.token_ids) - self.num_prompt_tokens


class Row(NamedTuple):
    """One row of a step: compute `token_ids[start : start + num_tokens]`, and sample after the last if `samples`.

    state_source: of a model with recurrent layers, the slot whose state the row starts from, most often the sequence's
    own; -1: it begins from zero. state_copies: (position, slot) to copy the state to once it covers so many leading
    tokens of the sequence, ascending. A copy may go to the slot that was the source.
    """

    sequence: WorkerSequence
    start: int
    num_tokens: int
    samples: bool
    state_source: int = -1
    state_copies: Sequence[tuple[int, int]] = ()


def end_of(params: SamplingParams, token_id: int, index: int) -> WorkerEnd | None:
    """The end that a produced token, at this position of the output (from 0), is to its request, if it is one."""
    if index < params.min_tokens:
        return None
    if token_id in params.eos_token_ids and not params.ignore_eos:
        return "eos"
    if params.stop_token_ids and token_id in params.stop_token_ids:
        return "stop_token"
    return None


class SequenceTable:
    """The sequences that a worker holds. Block numbers are below `num_blocks`, blocks hold `block_size` tokens, and
    state slots, if there are any, are below `state_slots`. own_blocks: the numbers of those that this worker has, if
    others of its replica have the rest.
    """

    def __init__(
        self, *, block_size: int, num_blocks: int, state_slots: int = 0, own_blocks: range | None = None
    ) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._state_slots = state_slots
        self._own_blocks = own_blocks
        #: Own blocks, counted from the first, of which those below this number have been in a table.
        self.num_blocks_used = 0
        self._sequences: dict[SequenceId, WorkerSequence] = {}
        #: By step, the rows whose tokens come later, with their numbers.
        self._expected: dict[int, list[tuple[int, Row]]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, identity: SequenceId) -> WorkerSequence:
        return self._sequences[identity]

    def apply(self, launch: Launched, payload: StepPayload) -> list[Row]:
        """The launch's rows, decodes first, once what came beside it, its `forget` and its blocks are folded in.

        Raises DesyncError where the launch and the table disagree.
        """
        for step, tokens in payload.results:
            self._record_results(step, tokens)
        for request, index in launch.forget:
            self._sequences.pop(SequenceId(request, index), None)
        for new in payload.new:
            self._add(new)
        held = [self._held(row[0], row[1]) for row in launch.decodes]
        held += [self._held(row[0], row[1]) for row in launch.chunks]
        for row_number, position, numbers in launch.blocks:
            if not 0 <= row_number < len(held):
                raise DesyncError(f"step {launch.step}: blocks for row {row_number} of {len(held)}")
            self._write_blocks(held[row_number], position, numbers)
        rows = [
            self._decode_row(sequence, confirmed, in_flight)
            for sequence, (_, _, confirmed, in_flight) in zip(held, launch.decodes, strict=False)
        ]
        for sequence, chunk in zip(held[len(rows) :], launch.chunks, strict=True):
            rows.append(self._chunk_row(sequence, chunk[2], chunk[3], samples=chunk[4] == 1))
        if self._state_slots or launch.states:
            self._apply_states(rows, launch)
        return rows

    def _apply_states(self, rows: list[Row], launch: Launched) -> None:
        """Give each row the source of its state and the copies to keep of it."""
        given = {entry[0]: entry for entry in launch.states}
        for number, row in enumerate(rows):
            sequence = row.sequence
            entry = given.pop(number, None)
            if entry is None:
                if sequence.state_slot < 0:
                    raise DesyncError(f"sequence {_name(sequence)}: its first row has no state slot")
                rows[number] = Row(sequence, row.start, row.num_tokens, row.samples, sequence.state_slot)
                continue
            _, slot, source, copies = entry
            if sequence.lacks_token:
                # Its state does not come as far as the launch says, and never will.
                copies = []
            self._check_state(row, slot, source, copies)
            sequence.state_slot = slot
            rows[number] = row._replace(state_source=source, state_copies=copies)
        if given:
            raise DesyncError(f"step {launch.step}: a state slot for row {min(given)} of {len(rows)}")

    def _check_state(self, row: Row, slot: int, source: int, copies: Sequence[tuple[int, int]]) -> None:
        name, own = f"sequence {_name(row.sequence)}", row.sequence.state_slot
        for number in (slot, max(source, 0), *(copy[1] for copy in copies)):
            if not 0 <= number < self._state_slots:
                raise DesyncError(f"{name}: state slot {number} of {self._state_slots}")
        if own not in (-1, slot):
            raise DesyncError(f"{name}: its state goes on in slot {slot}, but it is in {own}")
        if source < 0 and row.start:
            raise DesyncError(f"{name}: its state begins from zero at token {row.start}")
        last = row.start
        for position, number in copies:
            if not last < position <= row.start + row.num_tokens or number == slot:
                raise DesyncError(
                    f"{name}: a copy of its state in slot {slot} at token {position} to slot {number}, but the row "
                    f"computes tokens {row.start} to {row.start + row.num_tokens}"
                )
            last = position

    def record(self, rows: list[Row], tokens: list[list[int]]) -> None:
        """Append each row's produced tokens to its sequence and count the step as executed."""
        for row, produced in zip(rows, tokens, strict=True):
            sequence = row.sequence
            if row.samples and not produced:
                sequence.lacks_token = True
            sequence.token_ids.extend(produced)
            sequence.lengths.append(len(sequence.token_ids))

    def expect_results(self, step: int, rows: list[Row]) -> None:
        """As `record`, of a step whose tokens come beside a later launch."""
        self.record([row for row in rows if not row.samples], [[] for row in rows if not row.samples])
        # In place of those of an earlier step of this number: a warm-up's have no results.
        self._expected[step] = [(number, row) for number, row in enumerate(rows) if row.samples]

    def _record_results(self, step: int, tokens: list[list[int]]) -> None:
        """Of a step that is not expected, all is recorded already."""
        for number, row in self._expected.pop(step, ()):
            if number >= len(tokens):
                raise DesyncError(f"step {step}: tokens of {len(tokens)} rows, it had more")
            self.record([row], [tokens[number]])

    def expect(self, rows: list[Row]) -> None:
        """As `record`, of tokens that are not known yet: each row that samples gets one, -1 - slot in its place."""
        for sequence, _, _, samples, *_ in rows:
            if samples:
                sequence.token_ids.append(-1 - sequence.slot)
            sequence.lengths.append(len(sequence.token_ids))

    def _add(self, new: NewSequence) -> None:
        sequence = WorkerSequence(new)
        if sequence.id in self._sequences:
            raise DesyncError(f"sequence {_name(sequence)} is new in the payload, but is held already")
        if not sequence.token_ids or sequence.position < 0:
            raise DesyncError(
                f"sequence {_name(sequence)} comes with {len(sequence.token_ids)} tokens, "
                f"{new.num_prompt_tokens} of them its prompt"
            )
        self._sequences[sequence.id] = sequence

    def _held(self, request: int, index: int) -> WorkerSequence:
        # A tuple is as good as the name, and made in a tenth of the time.
        sequence: WorkerSequence | None = self._sequences.get((request, index))  # type: ignore[call-overload]
        if sequence is None:
            raise DesyncError(f"sequence {request}/{index} is not held and not in the payload")
        return sequence

    def _write_blocks(self, sequence: WorkerSequence, index: int, numbers: list[int]) -> None:
        table = sequence.block_table
        if not 0 <= index <= len(table):
            raise DesyncError(f"sequence {_name(sequence)}: blocks at index {index}, table has {len(table)}")
        for number in numbers:
            if not 0 <= number < self._num_blocks:
                raise DesyncError(f"sequence {_name(sequence)}: block {number} of {self._num_blocks}")
        table[index : index + len(numbers)] = array("i", numbers)
        if self._own_blocks is not None:
            numbers = [number - self._own_blocks.start for number in numbers if number in self._own_blocks]
        self.num_blocks_used = max(self.num_blocks_used, max(numbers, default=-1) + 1)

    def _decode_row(self, sequence: WorkerSequence, confirmed: int, in_flight: int) -> Row:
        lengths = sequence.lengths
        last_confirmed = len(lengths) - 1 - in_flight
        if last_confirmed < 0:
            raise DesyncError(
                f"sequence {_name(sequence)}: {in_flight} steps in flight, but only {len(lengths) - 1} known"
            )
        if lengths[last_confirmed] != confirmed:
            raise DesyncError(
                f"sequence {_name(sequence)}: {confirmed} tokens confirmed with {in_flight} steps in flight, "
                f"but it had {lengths[last_confirmed]} then"
            )
        # What is confirmed stays confirmed: no later launch asks for an earlier step.
        del lengths[:last_confirmed]
        length = len(sequence.token_ids)
        self._check_blocks(sequence, length)
        return Row(sequence, length - 1, 1, samples=True)

    def _chunk_row(self, sequence: WorkerSequence, start: int, num_tokens: int, *, samples: bool) -> Row:
        length = len(sequence.token_ids)
        end = start + num_tokens
        if start < 0 or num_tokens < 1 or end > length or (samples and end != length):
            raise DesyncError(
                f"sequence {_name(sequence)}: chunk from {start} to {end}"
                f"{', sampling' if samples else ''}, but it has {length} tokens"
            )
        self._check_blocks(sequence, end)
        return Row(sequence, start, num_tokens, samples)

    def _check_blocks(self, sequence: WorkerSequence, length: int) -> None:
        if length > len(sequence.block_table) * self._block_size:
            raise DesyncError(
                f"sequence {_name(sequence)}: {length} tokens need {ceil_div(length, self._block_size)} blocks, "
                f"table has {len(sequence.block_table)}"
            )


def _name(sequence: WorkerSequence) -> str:
    return f"{sequence.id.request}/{sequence.id.index}"
