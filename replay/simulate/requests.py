"""What the shells around a core know of live requests, made from fates: what a worker's answer to a launch says.

The same as `eventlm.engine.live_requests` says of a real worker, without a token: counts, ends, and the names of the
blocks whose last token's KV a step has stored.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from eventlm.events import Launched
from eventlm.replay.workload.workload import Fate, WorkloadRequest
from eventlm.types import WorkerEnd


class SimulatedSequence:
    """One live sequence. Totals are tokens of prompt and output; positions count output tokens.

    flag_from: the smallest total of tokens before a row at which the row may mean more than a token. has_left: it takes
    no more tokens.
    chunks_in_flight: rows in flight that produce nothing.
    """

    __slots__ = (
        "_marks",
        "blocks",
        "chunks_in_flight",
        "fate",
        "flag_from",
        "has_left",
        "index",
        "num_named",
        "place",
        "prompt_tokens",
        "seq",
        "watched",
    )

    def __init__(self, request: WorkloadRequest, place: int, seq: int, index: int, num_named: int) -> None:
        self.fate: Fate = request.fates[index]
        self.place = place
        self.seq = seq
        self.index = index
        self.prompt_tokens = request.arrival.prompt_tokens
        #: Blocks that have a name, and names to come.
        self.num_named = num_named
        self.blocks = iter(self.fate.blocks)
        #: Positions behind which somebody outside does something.
        self.watched: set[int] = set()
        if self.fate.text_end is not None:
            self.watched.add(self.fate.text_end.position)
        if request.patience is not None:
            self.watched.add(1)
        if request.cancel is not None and request.cancel.index == index:
            self.watched.add(request.cancel.position)
        #: All positions at which something happens, latest first, and those that have been passed taken off.
        self._marks = sorted({*self.watched, self.fate.worker_end}, reverse=True)
        self.flag_from = 0
        self.has_left = False
        self.chunks_in_flight = 0

    def flag_behind(self, total: int, block_size: int) -> None:
        """Set `flag_from` for rows behind a total."""
        position, marks = total - self.prompt_tokens, self._marks
        while marks and marks[-1] <= position:
            marks.pop()
        self.flag_from = (self.num_named + 1) * block_size
        if marks and self.prompt_tokens + marks[-1] <= self.flag_from:
            self.flag_from = self.prompt_tokens + marks[-1] - 1


class Watched(NamedTuple):
    """A sample has reached a position that somebody outside waits for."""

    sample: SimulatedSequence
    position: int


class SimulatedAnswer(NamedTuple):
    """What a worker will say of a launch: tokens of each row; rows that may mean more, with the total before them."""

    launched: Launched
    produced: list[int]
    flagged: list[tuple[int, SimulatedSequence, int]]


class SimulatedCompletion(NamedTuple):
    """Sparse parts of a completion, and the positions that its tokens reach, by row."""

    ends: list[tuple[int, WorkerEnd]]
    filled: list[tuple[int, list[int]]]
    watched: list[tuple[int, Watched]]


class SimulatedRequests:
    """All live requests of a simulated engine. `first_free_name`: names from there on stand for unknown content."""

    def __init__(self, *, block_size: int, first_free_name: int) -> None:
        self._block_size = block_size
        self._next_name = first_free_name
        self._samples: dict[int, list[SimulatedSequence | None]] = {}

    def admit(self, request: WorkloadRequest, place: int, seq: int, num_named: int) -> None:
        """A request gets its samples; `num_named` blocks of its prompt have names."""
        samples = [SimulatedSequence(request, place, seq, index, num_named) for index in range(request.arrival.n)]
        self._samples[seq] = list(samples)

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
            del self._samples[seq]

    def forget(self, seq: int) -> None:
        """A request was rejected."""
        del self._samples[seq]

    def sample(self, seq: int, index: int) -> SimulatedSequence | None:
        """A sample that takes tokens."""
        samples = self._samples.get(seq)
        return samples[index] if samples is not None else None

    def answer(self, launched: Launched) -> SimulatedAnswer:
        """What a worker will say of a launch. Runs for every row of every step: written for speed."""
        flagged = []
        all_samples = self._samples
        row = 0
        for request, index, confirmed, in_flight in launched.decodes:
            if request in all_samples:
                sample = all_samples[request][index]
                if sample is not None:
                    total = confirmed + in_flight - sample.chunks_in_flight
                    if total >= sample.flag_from:
                        flagged.append((row, sample, total))
            row += 1
        produced = [1] * row
        for request, index, start, num_tokens, samples in launched.chunks:
            computing = self.sample(request, index)
            if computing is not None:
                flagged.append((row, computing, start + num_tokens))
                computing.chunks_in_flight += not samples
            produced.append(samples)
            row += 1
        return SimulatedAnswer(launched, produced, flagged)

    def give_up(self, answer: SimulatedAnswer) -> None:
        """The worker is gone: nobody will answer."""
        for _, sample, _ in answer.flagged:
            sample.chunks_in_flight = 0

    def complete(self, answer: SimulatedAnswer) -> SimulatedCompletion:
        """The sparse parts of the completion, with names for blocks, as of now: who has left says nothing more."""
        found = SimulatedCompletion([], [], [])
        size, num_decodes = self._block_size, len(answer.launched.decodes)
        for row, sample, total in answer.flagged:
            if sample.has_left:
                continue
            if row >= num_decodes:
                sample.chunks_in_flight -= not answer.produced[row]
            # A decode stores the KV of all tokens before the one that it produces, a chunk that of its own.
            num_filled = total // size - sample.num_named
            if num_filled > 0:
                found.filled.append((row, self._name(sample, num_filled)))
            if answer.produced[row]:
                position = total + 1 - sample.prompt_tokens
                if position == sample.fate.worker_end:
                    found.ends.append((row, sample.fate.worker_reason))
                if position in sample.watched:
                    found.watched.append((row, Watched(sample, position)))
            sample.flag_behind(total, size)
        return found

    def _name(self, sample: SimulatedSequence, num_blocks: int) -> list[int]:
        """Names of a sample's next blocks: its own as far as they are known, then new ones."""
        sample.num_named += num_blocks
        first = self._next_name
        if not sample.fate.blocks:
            self._next_name += num_blocks
            return list(range(first, first + num_blocks))
        names = list(islice(sample.blocks, num_blocks))
        if len(names) < num_blocks or 0 in names:
            fresh = iter(range(first, first + num_blocks))
            names = [name or next(fresh) for name in names] + list(islice(fresh, num_blocks - len(names)))
            self._next_name = next(fresh, first + num_blocks)
        return names
