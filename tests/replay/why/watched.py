"""A rig of a core whose sequences are watched from drain to drain, with a witness, as a log's follower does."""

from __future__ import annotations

from typing import Any

from eventlm.core.state.plan_witness import PlanEntry
from eventlm.core.wait_reason import WaitWatch
from eventlm.events import Decision, Fact
from eventlm.replay.why.constraints import Constraint, ConstraintName
from eventlm.replay.why.why import Why, why
from eventlm.types import SequenceId
from tests.core.rig import Rig


class WatchedRig(Rig):
    """`ask` is `why` after the latest drain."""

    def __init__(self, **options: Any) -> None:
        self.watches: dict[SequenceId, WaitWatch] = {}
        self.reasons: dict[SequenceId, Any] = {}
        self.witness: list[PlanEntry] = []
        super().__init__(**options)

    def feed(self, *facts: Fact, at: int = 0) -> list[Decision]:
        """One drain, with a witness of its own."""
        self.witness = self.state.witness = []
        decisions = super().feed(*facts, at=at)
        for request in self.state.requests.values():
            for sequence in request.sequences:
                watch = self.watches.setdefault(sequence.id, WaitWatch())
                self.reasons[sequence.id] = watch.look(self.state, sequence)
        return decisions

    def ask(self, request: int, index: int = 0) -> Why:
        identity = SequenceId(request, index)
        plans = self.watches[identity].plans if identity in self.watches else {}
        return why(self.state, request, index, self.reasons.get(identity), plans, self.witness)


def constraint(found: Why, name: ConstraintName) -> Constraint:
    """The only one of a name, or that of the replica in question."""
    named = [each for each in found.constraints if each.name == name]
    return next(each for each in named if len(named) == 1 or each.replica == found.replica)
