"""Live requests of a simulated engine, and what its workers report for a launch.

The counterpart of `eventlm.engine.live_requests`, without tokens: counts, ends, and the names of the blocks that a step
has filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from eventlm.core.state.sequence import AdmittedRequest
from eventlm.events import Launched
from eventlm.replay.workload.workload import SequenceOutput, WorkloadRequest
from eventlm.types import WorkerEnd


class SimulatedSequence:
    """One live sequence. Totals are tokens of prompt and output; positions count output tokens.

    flag_from: the smallest total before a row from which the row may have side effects: an end, a filled block or a
    watched position. has_left: it takes no more tokens. chunks_in_flight: rows in flight that produce no token.
    """

    __slots__ = (
        "_marks",
        "block_size",
        "blocks",
        "chunks_in_flight",
        "flag_from",
        "has_left",
        "index",
        "num_named",
        "output",
        "prompt_tokens",
        "request",
        "seq",
        "watched",
    )

    def __init__(self, request: WorkloadRequest, seq: int, index: int, num_named: int, block_size: int) -> None:
        self.request = request
        self.block_size = block_size
        self.output: SequenceOutput = request.outputs[index]
        self.seq = seq
        self.index = index
        self.prompt_tokens = request.arrival.prompt_tokens
        #: Number of blocks with a name, and the names to come.
        self.num_named = num_named
        self.blocks = iter(self.output.blocks)
        #: Positions that trigger a text end or a cancel, or end the client's patience.
        self.watched: set[int] = set()
        if self.output.text_end is not None:
            self.watched.add(self.output.text_end.position)
        if request.patience is not None:
            self.watched.add(1)
        if request.cancel is not None and request.cancel.index == index:
            self.watched.add(request.cancel.position)
        #: All positions with side effects that have not been passed, latest first.
        self._marks = sorted({*self.watched, self.output.worker_end}, reverse=True)
        self.flag_from = 0
        self.has_left = False
        self.chunks_in_flight = 0

    def skip_names(self, num_blocks: int) -> None:
        """So many of the blocks that it fills have their names already."""
        next(islice(self.blocks, num_blocks, num_blocks), None)

    def update_flag(self, total: int) -> None:
        """Set `flag_from` for rows after a total."""
        position, marks = total - self.prompt_tokens, self._marks
        while marks and marks[-1] <= position:
            marks.pop()
        self.flag_from = (self.num_named + 1) * self.block_size
        if marks and self.prompt_tokens + marks[-1] <= self.flag_from:
            self.flag_from = self.prompt_tokens + marks[-1] - 1


class Watched(NamedTuple):
    """A sample has reached one of its watched positions."""

    sample: SimulatedSequence
    position: int


class SimulatedResult(Struct, frozen=True, eq=False):
    """A worker's future result: tokens of each row; rows that may have side effects, with the total before them."""

    launched: Launched
    produced: list[int]
    flagged: list[tuple[int, SimulatedSequence, int]]


class SimulatedCompletion(Struct, frozen=True, eq=False):
    """Sparse parts of a completion, and the watched positions that it reaches, by row."""

    ends: list[tuple[int, WorkerEnd]] = []
    filled: list[tuple[int, list[int]]] = []
    watched: list[tuple[int, Watched]] = []


class SimulatedRequests:
    """All live requests of a simulated engine. block_sizes: of each replicaset. `first_free_name`: from there on names
    stand for unknown content.
    """

    def __init__(self, *, block_sizes: Sequence[int], first_free_name: int) -> None:
        self._block_sizes = block_sizes
        self._next_name = first_free_name
        self._samples: dict[int, list[SimulatedSequence | None]] = {}
        #: By request, a total below which no row of any of its samples has side effects.
        self._flag_from: dict[int, int] = {}

    def admit(self, request: WorkloadRequest, seq: int, num_named: int) -> None:
        """A request gets its samples; `num_named` blocks of its prompt have names."""
        size = self._block_sizes[request.arrival.replicaset]
        self._samples[seq] = [
            SimulatedSequence(request, seq, index, num_named, size) for index in range(request.arrival.n)
        ]
        self._flag_from[seq] = 0

    def resume(self, request: WorkloadRequest, admitted: AdmittedRequest) -> None:
        """A request that the core has had for a while goes on; those of its samples that take no more tokens do not."""
        samples: list[SimulatedSequence | None] = []
        for sequence in admitted.sequences:
            sample = None
            if not sequence.ended:
                num_named = len(sequence.block_names)
                size = self._block_sizes[request.arrival.replicaset]
                sample = SimulatedSequence(request, sequence.request, sequence.index, num_named, size)
                sample.skip_names(num_named - len(sequence.arrival.blocks))
            samples.append(sample)
        if any(samples):
            self._samples[admitted.arrival.s] = samples
            self._flag_from[admitted.arrival.s] = 0

    def leave(self, seq: int, index: int) -> None:
        """A sample takes no more tokens."""
        samples = self._samples.get(seq)
        if samples is None:
            return
        sample = samples[index]
        if sample is not None:
            sample.has_left = True
            samples[index] = None
        if not any(samples):
            self.forget(seq)

    def forget(self, seq: int) -> None:
        """A request was rejected, or has ended."""
        del self._samples[seq], self._flag_from[seq]

    def result(self, launched: Launched) -> SimulatedResult:
        """A worker's future result for a launch. Runs for every row of every step: written for speed."""
        flagged = []
        all_samples, flag_from = self._samples, self._flag_from
        row = 0
        for request, index, confirmed, in_flight in launched.decodes:
            # The chunks in flight only make its total smaller.
            if request in flag_from and confirmed + in_flight >= flag_from[request]:
                sample = all_samples[request][index]
                if sample is not None:
                    total = confirmed + in_flight - sample.chunks_in_flight
                    if total >= sample.flag_from:
                        flagged.append((row, sample, total))
            row += 1
        produced = [1] * row
        for request, index, start, num_tokens, samples in launched.chunks:
            if request in all_samples:
                sample = all_samples[request][index]
                if sample is not None:
                    flagged.append((row, sample, start + num_tokens))
                    sample.chunks_in_flight += not samples
            produced.append(samples)
            row += 1
        return SimulatedResult(launched, produced, flagged)

    def discard(self, result: SimulatedResult) -> None:
        """The worker is lost, and the result with it."""
        for _, sample, _ in result.flagged:
            sample.chunks_in_flight = 0

    def complete(self, result: SimulatedResult) -> SimulatedCompletion:
        """The sparse parts of the completion, with names for blocks. Sequences that have left are ignored."""
        found = SimulatedCompletion()
        num_decodes = len(result.launched.decodes)
        for row, sample, total in result.flagged:
            if sample.has_left:
                continue
            if row >= num_decodes:
                sample.chunks_in_flight -= not result.produced[row]
            # A decode stores the KV of all tokens before the one that it produces, a chunk the KV of its own.
            num_filled = total // sample.block_size - sample.num_named
            if num_filled > 0:
                found.filled.append((row, self._name(sample, num_filled)))
            if result.produced[row]:
                position = total + 1 - sample.prompt_tokens
                if position == sample.output.worker_end:
                    found.ends.append((row, sample.output.worker_reason))
                if position in sample.watched:
                    found.watched.append((row, Watched(sample, position)))
            sample.update_flag(total)
            samples = self._samples[sample.seq]
            self._flag_from[sample.seq] = min([each.flag_from for each in samples if each is not None])
        return found

    def _name(self, sample: SimulatedSequence, num_blocks: int) -> list[int]:
        """Names of a sample's next blocks: recorded ones as far as known, then new ones."""
        sample.num_named += num_blocks
        first = self._next_name
        if not sample.output.blocks:
            self._next_name += num_blocks
            return list(range(first, first + num_blocks))
        names = list(islice(sample.blocks, num_blocks))
        if len(names) < num_blocks or 0 in names:
            fresh = iter(range(first, first + num_blocks))
            names = [name or next(fresh) for name in names] + list(islice(fresh, num_blocks - len(names)))
            self._next_name = next(fresh, first + num_blocks)
        return names
