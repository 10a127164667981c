"""Compares a re-executed step with the recorded one: tokens, counts, ends, and which blocks are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from eventlm.events import Launched, StepCompleted
from eventlm.replay.verify.divergence import Code
from eventlm.types import SequenceId
from eventlm.worker.protocol import StepResult

#: token: another token; count: more or fewer tokens; end: another reason, or none; blocks: equal instead of different
#: blocks, or vice versa; digest: anything in a step whose recorded tokens are missing.
MismatchKind = Literal["token", "count", "end", "blocks", "digest"]

#: Blocks of a long prompt that are listed.
MAX_SHOWN = 8


class Mismatch(Struct, frozen=True, kw_only=True):
    """One difference. `s`: of the completion (of a prompt's blocks: of the arrival). position: in the output, where it
    begins.

    recorded, executed: the values in the run and in the re-execution. row, request, index and position are -1 for a
    whole step or a prompt.
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
    #: Additional information.
    note: str = ""
    code: str = Code.TOKEN.name.lower()

    def describe(self) -> str:
        """One sentence."""
        where = f"event {self.s}"
        if self.step >= 0:
            where += f", step {self.step} of replica {self.replica}"
        for name in ("request", "index", "position"):
            if getattr(self, name) >= 0:
                where += f", {name} {getattr(self, name)}"
        what = f"{self.kind} recorded {_shown(self.recorded)}, re-executed {_shown(self.executed)}"
        return f"{where}: {what}{f' ({self.note})' if self.note else ''}"


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > MAX_SHOWN:
        return f"{value[:MAX_SHOWN]} and {len(value) - MAX_SHOWN:,} more"
    return "nothing" if value is None else str(value)


class Bijection:
    """A one-to-one mapping of the run's block integers to those of the re-execution, as far as known. Each replicaset
    has integers of its own.
    """

    def __init__(self) -> None:
        self._executed_of: dict[tuple[int, int], int] = {}
        self._recorded_of: dict[tuple[int, int], int] = {}

    def pair(self, replicaset: int, recorded: list[int], executed: list[int]) -> bool:
        """Whether these can be the same blocks of a replicaset, given all pairs before."""
        if len(recorded) != len(executed):
            return False
        return all(
            self._executed_of.setdefault((replicaset, mine), other) == other
            and self._recorded_of.setdefault((replicaset, other), mine) == mine
            for mine, other in zip(recorded, executed, strict=True)
        )


class ReExecutedStep(Struct, kw_only=True):
    """A step that has run again and waits for its `emit`.

    positions: by row, the number of tokens before; None if the sequence takes no more. recorded: the run's tokens, or
    None if they are missing. fact, again: the completions of the run and of the re-execution.
    """

    launched: Launched
    fact: StepCompleted
    again: StepCompleted
    result: StepResult
    recorded: list[list[int]] | None
    positions: list[int | None]
    #: Whether the run's tokens match the digest in the trace.
    is_recorded_sound: bool = True
    #: The sequences continue with the run's tokens in any case.
    is_forced: bool = False

    @property
    def rows(self) -> list[SequenceId]:
        """The sequences of the launch."""
        launched = self.launched
        return [SequenceId(row[0], row[1]) for row in (*launched.decodes, *launched.chunks)]


class TokenComparison:
    """Compares steps in the order of their completions. sets: by replica, the number of its replicaset. `num_tokens`
    counts equal tokens.
    """

    def __init__(self, sets: Sequence[int]) -> None:
        self._sets = sets
        self.num_tokens = 0
        self.num_steps_by_digest = 0
        self.blocks = Bijection()

    def compare(self, step: ReExecutedStep, dropped: set[int]) -> list[Mismatch]:
        """All differences of a step, row by row. Tokens of rows in `dropped` were discarded."""
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
        note = "" if step.is_recorded_sound else "the token log's tokens do not match the digest in the trace"
        for at, (mine, other) in enumerate(zip(recorded, executed, strict=False), base):
            if mine != other:
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
        """Of the whole step, if no row differs. The digest in the trace counts."""
        if step.again.digest == step.fact.digest:
            return []
        if step.recorded is None:
            note = "the token log's line of this step is missing or damaged, so the position is unknown"
        elif step.recorded == step.result.tokens:
            note = "the token log's tokens were reproduced, but they do not match the digest in the trace"
        else:
            # Only discarded tokens differ.
            return []
        return [self._at(step, "digest", recorded=step.fact.digest, executed=step.again.digest, note=note)]

    def _compare_ends(
        self, step: ReExecutedStep, kept: list[int], rows: list[SequenceId], known: set[int]
    ) -> list[Mismatch]:
        """Rows in `known` have another difference already."""
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
            if not self.blocks.pair(self._sets[step.fact.replica], mine, other):
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
