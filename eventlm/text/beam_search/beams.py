"""The beams of one search: which continuations are kept, which are complete, and when no better one can come.

The definitions are transformers', with `early_stopping="never"`. At each step all beams' continuations are ranked by
the sum of their tokens' log-probabilities. Those among the first `width` that end are complete; the first `width` that
do not end go on. The score of a complete one is that sum, divided by its number of tokens to the power of the length
penalty. The search is over when no beam can reach the worst of `width` complete ones any more, or at the most tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eventlm.sampling_params import TokenLogprobs


class Top(NamedTuple):
    """The most likely tokens at one position, best first."""

    token_ids: list[int]
    logprobs: list[float]


NO_TOP = Top([], [])


class Beam:
    """The prompt (`parent` None), or a beam and one more token.

    rank: of the token among all that could follow, from 1. top: the most likely ones of them and their
    log-probabilities. total: the sum of the log-probabilities of all tokens.
    """

    __slots__ = ("length", "logprob", "parent", "rank", "token_id", "top", "total")

    def __init__(
        self, parent: Beam | None = None, token_id: int = -1, logprob: float = 0.0, rank: int = 0, top: Top = NO_TOP
    ) -> None:
        self.parent = parent
        self.token_id = token_id
        self.logprob = logprob
        self.rank = rank
        self.top = top
        self.length: int = 0 if parent is None else parent.length + 1
        self.total: float = logprob if parent is None else parent.total + logprob

    def token_ids(self) -> list[int]:
        """Its tokens after the prompt."""
        return [beam.token_id for beam in self._path()]

    def token_logprobs(self) -> TokenLogprobs:
        """The log-probabilities of its tokens."""
        path = list(self._path())
        return TokenLogprobs(
            logprobs=[beam.logprob for beam in path],
            ranks=[beam.rank for beam in path],
            top_ids=[beam.top.token_ids for beam in path],
            top_logprobs=[beam.top.logprobs for beam in path],
        )

    def _path(self) -> Iterator[Beam]:
        path: list[Beam] = []
        beam = self
        while beam.parent is not None:
            path.append(beam)
            beam = beam.parent
        return reversed(path)


class Hypothesis(NamedTuple):
    """A complete beam. ends: whether its last token is an end, not the most tokens."""

    score: float
    beam: Beam
    ends: bool


class Beams:
    """A search. live: its beams, best first; at first the prompt alone. complete: best first, at most `width`.

    ends: the tokens that end a beam; `min_tokens` come before. num_top: how many of each position's most likely tokens
    the beams keep.
    """

    def __init__(
        self,
        *,
        width: int,
        length_penalty: float,
        max_tokens: int,
        ends: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        num_top: int = 0,
    ) -> None:
        self.live = [Beam()]
        self.complete: list[Hypothesis] = []
        self._width = width
        self._length_penalty = length_penalty
        self._max_tokens = max_tokens
        self._ends = ends
        self._min_tokens = min_tokens
        self._num_top = num_top

    @property
    def num_candidates(self) -> int:
        """How many of the most likely tokens of each beam `advance` needs: the width without those that end."""
        return self._width + len(self._ends)

    @property
    def is_over(self) -> bool:
        """Whether nothing can change any more."""
        if not self.live:
            return True
        if len(self.complete) < self._width:
            return False
        best = self.live[0]
        # With a positive penalty a longer beam may score better: at best it has all tokens, and the rest cost nothing.
        length = self._max_tokens if self._length_penalty > 0 else best.length
        return self._score(best.total, length) <= self.complete[-1].score

    def advance(self, tops: Sequence[Top]) -> None:
        """Take the next step. tops: the most likely next tokens of each live beam, `num_candidates` or more."""
        length = self.live[0].length + 1
        barred = self._ends if length <= self._min_tokens else frozenset()
        num = self.num_candidates
        candidates = [
            (beam.total + logprob, number, rank)
            for number, (beam, top) in enumerate(zip(self.live, tops, strict=True))
            for rank, (token_id, logprob) in enumerate(zip(top.token_ids[:num], top.logprobs, strict=False))
            if token_id not in barred
        ]
        # Of equals the one of the better beam goes first, and of one beam's the likelier.
        ranked = heapq.nsmallest(
            self._width + len(self.live) * len(self._ends), candidates, key=lambda each: (-each[0], *each[1:])
        )
        kept = [Top(top.token_ids[: self._num_top], top.logprobs[: self._num_top]) for top in tops]
        parents, self.live = self.live, []
        for place, (_, number, rank) in enumerate(ranked):
            top = tops[number]
            beam = Beam(parents[number], top.token_ids[rank], top.logprobs[rank], rank + 1, kept[number])
            ends = beam.token_id in self._ends
            if ends or length == self._max_tokens:
                if place < self._width:
                    self.complete.append(Hypothesis(self._score(beam.total, length), beam, ends))
            elif len(self.live) < self._width:
                self.live.append(beam)
        self.complete.sort(key=lambda each: -each.score)
        del self.complete[self._width :]

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._length_penalty)
