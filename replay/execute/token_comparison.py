"""What a step gave again, compared with what it gave in the run: tokens, counts, ends, and which blocks are equal."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from eventlm.events import Launched, StepCompleted
from eventlm.replay.verify.divergence import Code
from eventlm.types import SequenceId
from eventlm.worker.protocol import StepResult

#: token: another one; count: more or fewer; end: another reason, or none; blocks: equal blocks that were different, or
#: the other way round; digest: something in the step, whose recorded tokens are not at hand.
MismatchKind = Literal["token", "count", "end", "blocks", "digest"]

#: So many blocks of a long prompt are told.
MAX_SHOWN = 8


class Mismatch(Struct, frozen=True, kw_only=True):
    """One difference. `s` is the completion's (of prompts' blocks: the arrival's), `position` the place in the output
    where it begins.

    recorded, executed: what stands there in the run and in the re-execution. row, request, index and position are -1
    where a whole step or a prompt is meant.
    """

    kind: MismatchKind
    s: int
    step: int = -1
    replica: int = -1
    epoch: int = -1
    row: int = -1
    request: int = -1
    index: int = -1
    position: int = -1
    recorded: Any = None
    executed: Any = None
    #: What is known beside it.
    note: str = ""
    code: str = Code.TOKEN.name.lower()

    def describe(self) -> str:
        """One sentence for a person."""
        place = f"event {self.s}"
        if self.step >= 0:
            place += f", step {self.step} of replica {self.replica}"
        if self.request >= 0:
            place += f", request {self.request}"
        if self.index >= 0:
            place += f", index {self.index}"
        if self.position >= 0:
            place += f", position {self.position}"
        what = f"{self.kind} recorded {_shown(self.recorded)}, re-executed {_shown(self.executed)}"
        return f"{place}: {what}{f' ({self.note})' if self.note else ''}"


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > MAX_SHOWN:
        return f"{value[:MAX_SHOWN]} and {len(value) - MAX_SHOWN:,} more"
    return "nothing" if value is None else str(value)


class Bijection:
    """Block integers of the run and of the re-execution, as far as they have been seen beside each other."""

    def __init__(self) -> None:
        self._executed_of: dict[int, int] = {}
        self._recorded_of: dict[int, int] = {}

    def pair(self, recorded: list[int], executed: list[int]) -> bool:
        """Whether these may stand for the same blocks, given all pairs before."""
        if len(recorded) != len(executed):
            return False
        return all(
            self._executed_of.setdefault(mine, other) == other and self._recorded_of.setdefault(other, mine) == mine
            for mine, other in zip(recorded, executed, strict=True)
        )


class ReExecutedStep(Struct, kw_only=True):
    """A step that has run again, until the core's word on it.

    positions: by row, how many tokens the sequence had been given; None where it takes no more. recorded: the run's
    tokens, or None where they are not at hand. fact, again: the run's completion, and that of the re-execution.
    """

    launched: Launched
    fact: StepCompleted
    again: StepCompleted
    result: StepResult
    recorded: list[list[int]] | None
    positions: list[int | None]
    #: Whether the run's tokens have the digest that is in the trace.
    is_recorded_sound: bool = True
    #: The sequences go on with the run's tokens, whatever they gave.
    is_forced: bool = False

    @property
    def rows(self) -> list[SequenceId]:
        """The sequences of the launch."""
        launched = self.launched
        return [SequenceId(row[0], row[1]) for row in (*launched.decodes, *launched.chunks)]


class TokenComparison:
    """Compares steps in the order of their completions. `num_tokens` counts those that are the same."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_steps_by_digest = 0
        self.blocks = Bijection()

    def compare(self, step: ReExecutedStep, dropped: set[int]) -> list[Mismatch]:
        """All differences of a step, row by row; what rows in `dropped` produced was shown to nobody."""
        rows = step.rows
        kept = [row for row in range(len(rows)) if row not in dropped]
        found = []
        if step.recorded is not None:
            for row in kept:
                found += self._compare_row(step, row, rows[row], step.recorded[row])
        else:
            found += self._compare_counts(step, kept, rows)
        found += self._compare_ends(step, kept, rows, {mismatch.row for mismatch in found})
        if not found:
            found += self._compare_digests(step)
        if step.recorded is None:
            self.num_steps_by_digest += 1
            if not found:
                self.num_tokens += sum(len(step.result.tokens[row]) for row in kept)
        if not found or step.is_forced:
            found += self._compare_filled(step, rows)
        return found

    def _compare_row(self, step: ReExecutedStep, row: int, identity: SequenceId, recorded: list[int]) -> list[Mismatch]:
        executed = step.result.tokens[row]
        base = step.positions[row] or 0
        note = "" if step.is_recorded_sound else "the token log's tokens do not have the digest that is in the trace"
        for place, (mine, other) in enumerate(zip(recorded, executed, strict=False)):
            if mine != other:
                at = base + place
                return [self._at(step, "token", row, identity, at, recorded=mine, executed=other, note=note)]
            self.num_tokens += 1
        if len(recorded) != len(executed):
            counts = {"recorded": len(recorded), "executed": len(executed)}
            at = base + min(counts.values())
            return [self._at(step, "count", row, identity, at, **counts, note=note)]
        return []

    def _compare_counts(self, step: ReExecutedStep, kept: list[int], rows: list[SequenceId]) -> list[Mismatch]:
        found = []
        for row in kept:
            mine, other = step.fact.produced[row], len(step.result.tokens[row])
            if mine != other:
                at = (step.positions[row] or 0) + min(mine, other)
                found.append(self._at(step, "count", row, rows[row], at, recorded=mine, executed=other))
        return found

    def _compare_digests(self, step: ReExecutedStep) -> list[Mismatch]:
        """Of the step as a whole, where nothing is known of its rows; the trace is what counts."""
        if step.again.digest == step.fact.digest:
            return []
        if step.recorded is None:
            note = "the token log's line of this step is missing or damaged, so the place is not known"
        elif step.recorded == step.result.tokens:
            note = "the token log's tokens came out again, but they do not have the digest that is in the trace"
        else:
            # What differs was shown to nobody.
            return []
        return [self._at(step, "digest", recorded=step.fact.digest, executed=step.again.digest, note=note)]

    def _compare_ends(
        self, step: ReExecutedStep, kept: list[int], rows: list[SequenceId], known: set[int]
    ) -> list[Mismatch]:
        """An end that goes with another token has been told already."""
        recorded, executed = dict(step.fact.ends), dict(step.result.ends)
        found = []
        for row in kept:
            mine, other = recorded.get(row), executed.get(row)
            if row not in known and mine != other:
                at = (step.positions[row] or 0) + len(step.result.tokens[row]) - 1
                found.append(self._at(step, "end", row, rows[row], at, recorded=mine, executed=other))
        return found

    def _compare_filled(self, step: ReExecutedStep, rows: list[SequenceId]) -> list[Mismatch]:
        recorded, executed = dict(step.fact.filled), dict(step.again.filled)
        found = []
        for row in sorted(recorded.keys() | executed.keys()):
            mine, other = recorded.get(row, []), executed.get(row, [])
            if not self.blocks.pair(mine, other):
                at = step.positions[row] or 0
                found.append(self._at(step, "blocks", row, rows[row], at, recorded=mine, executed=other))
        return found

    def _at(
        self,
        step: ReExecutedStep,
        kind: MismatchKind,
        row: int = -1,
        identity: SequenceId | None = None,
        position: int = -1,
        *,
        recorded: Any,
        executed: Any,
        note: str = "",
    ) -> Mismatch:
        return Mismatch(
            kind=kind,
            s=step.fact.s,
            step=step.fact.step,
            replica=step.fact.replica,
            epoch=step.fact.epoch,
            row=row,
            request=identity.request if identity is not None else -1,
            index=identity.index if identity is not None else -1,
            position=position,
            recorded=recorded,
            executed=executed,
            note=note,
        )
