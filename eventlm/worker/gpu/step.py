"""A step that the device computes while its worker goes on; its tokens are taken in when they have come back."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from eventlm.worker.gpu.device import Mark
from eventlm.worker.protocol import RowExtras, StepOutput
from eventlm.worker.sequence_table import Row

#: Takes in the tokens of a step's rows; gives the step's output.
Settle = Callable[["GpuStep", list[int]], StepOutput]


class GpuStep:
    """A launch under way. Steps are settled in the order of their launches, at the latest by `finish`."""

    def __init__(
        self, rows: list[Row], numbers: list[int], forced: list[int] | None, begun: Mark, settle: Settle
    ) -> None:
        self.rows = rows
        #: Of the rows that sample, and where each one's token will stand in its sequence's `token_ids`.
        self.numbers = numbers
        self.sequences = [rows[number].sequence for number in numbers]
        self.positions = [len(sequence.token_ids) for sequence in self.sequences]
        self.forced = forced
        self.extras: list[RowExtras] = []
        #: Numbers of rows whose extras are not finite.
        self.not_finite: set[int] = set()
        self.ops: dict[str, int] = {}
        self._settle = settle
        self._begun = begun
        self._ended: Mark | None = None
        self._drawn: Tensor | None = None
        self._output: StepOutput | None = None
        #: When it was last seen to be under way.
        self._running_ns = 0
        #: A device does not say how long it will take.
        self.due_ns = 0
        #: When the device began and ended it, on this machine's monotonic clock, as far as a host can see; when it is
        #: finished.
        self.times_ns = (0, 0)

    def launched(self, drawn: Tensor | None, ended: Mark) -> None:
        """All of it is launched: its tokens will be in this memory of the host, in order, once `ended` is past."""
        self._drawn, self._ended = drawn, ended

    def is_done(self) -> bool:
        """Whether `finish` need not wait."""
        assert self._ended is not None
        is_done = self._output is not None or self._ended.is_past()
        if not is_done:
            self._running_ns = time.monotonic_ns()
        return is_done

    def settle(self) -> None:
        """Take its tokens in, once the device has passed. Harmless when called twice."""
        if self._output is None:
            assert self._ended is not None
            self._ended.wait()
            self._output = self._settle(self, self._drawn.tolist() if self._drawn is not None else [])

    def finish(self) -> StepOutput:
        """What it gave. Waits for it."""
        self.settle()
        assert self._output is not None
        return self._output

    def note_times(self, ended_before_ns: int) -> None:
        """The device is past it, and ended the step before then.

        A host that is busy with the next step sees the end late, and then goes by how long the device took: from its
        launch, or where the device was still busy then, from the end of the step before.
        """
        assert self._ended is not None
        duration_ns = self._ended.ns_since(self._begun)
        expected_ns = max(self._begun.set_ns, ended_before_ns) + duration_ns
        end_ns = max(min(max(expected_ns, self._running_ns), time.monotonic_ns()), ended_before_ns)
        self.times_ns = (max(end_ns - duration_ns, ended_before_ns), end_ns)
