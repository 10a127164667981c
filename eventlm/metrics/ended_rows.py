"""Rows of the sequences that ended last: for the outputs that report their end, and for later requests for them."""

from __future__ import annotations

from eventlm.metrics.rows import RequestRow, StepRow
from eventlm.types import SequenceId

#: As many as there are replies to look up.
MAX_ROWS = 16_384


class EndedRows:
    """A sink of the metrics store that keeps the latest rows."""

    def __init__(self, *, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        #: The oldest first.
        self._rows: dict[tuple[int, int], RequestRow] = {}

    def request_ended(self, row: RequestRow) -> None:
        """Keep it until there are too many."""
        self._rows[row.request, row.index] = row
        if len(self._rows) > self._max_rows:
            del self._rows[next(iter(self._rows))]

    def step_completed(self, row: StepRow) -> None:
        """Steps are not kept."""

    def find(self, identity: SequenceId) -> RequestRow | None:
        """The row of a sequence; None if it has not ended, ended long ago, or was not measured."""
        return self._rows.get(identity)
