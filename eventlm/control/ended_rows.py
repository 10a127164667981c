"""What the metrics store says of the sequences that have just ended, for the outputs that tell their edges so."""

from __future__ import annotations

from eventlm.control.metrics_rows import RequestRow, StepRow
from eventlm.types import SequenceId


class EndedRows:
    """A sink of the metrics store. Each row is taken as soon as its event is published, so few are here at a time."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], RequestRow] = {}

    def request_ended(self, row: RequestRow) -> None:
        """Keep it until it is taken."""
        self._rows[row.request, row.index] = row

    def step_completed(self, row: StepRow) -> None:
        """Of steps nobody asks."""

    def take(self, identity: SequenceId) -> RequestRow | None:
        """The row of a sequence that has ended; None where the store has not measured it."""
        return self._rows.pop(identity, None)
