"""One sequence's position in its grammar: which tokens may follow, and when it is over.

An end token or a stop token may be drawn where the text may end by the grammar, and nowhere else, so an output that
ends by one is whole. `ignore_eos` goes on for as long as the grammar allows more. Where nothing but an end may follow
the sequence ends with `grammar`, and with `error` where not even that may, or where llguidance gave up.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from eventlm.types import WorkerEnd
from eventlm.worker.sampling.vocabulary_masks import mask_bytes
from eventlm.worker.sequence_table import WorkerSequence, end_of


class SequenceGrammar:
    """A sequence that has a grammar. `matcher` is its own, None if there is none to be had.

    What llguidance writes is a mask with one more bit, for the end.
    """

    def __init__(self, sequence: WorkerSequence, matcher: LLMatcher | None, vocab_size: int) -> None:
        self.matcher = matcher
        self._vocab_size = vocab_size
        params = self._params = sequence.params
        eos_ids = params.eos_token_ids
        self._ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos_ids))
        self._end_bits = _bits(sorted(self._ends), vocab_size)
        #: Neither text nor an end where it is ignored.
        self._never_text = _bits([*sorted(self._ends), *eos_ids], vocab_size)
        #: Drawn where nothing may be.
        self._last_bits = _bits(eos_ids or sorted(self._ends) or [0], vocab_size)
        self._may_end = False
        #: Nothing can follow, and this is why.
        self.over: WorkerEnd | None = None
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        if matcher is None or (output and not matcher.consume_tokens(output)):
            self.over = "error"

    def narrow(self, mask: np.ndarray) -> np.ndarray:
        """The tokens that may be drawn now, at least one, from what llguidance wrote: uint8, little-endian."""
        text = mask[: len(self._end_bits)].copy()
        index = self._vocab_size
        self._may_end = bool(mask[index >> 3] >> (index & 7) & 1)
        if index & 7:
            text[-1] &= (1 << (index & 7)) - 1
        if self.over is None and self.matcher is not None and self.matcher.is_error():
            self.over = "error"
        if self.over is not None:
            return self._last_bits
        found: np.ndarray = text & ~self._never_text
        if self._may_end:
            found |= self._end_bits
        if found.any():
            return found
        if text.any():
            # The grammar names an end token itself.
            return text
        self.over = "grammar" if self._may_end else "error"
        return self._last_bits

    def advance(self, token_id: int, position: int) -> WorkerEnd | None:
        """Go on with a token at a position of the output (from 0); the end that it is, if it is one."""
        if self.over == "error":
            return "error"
        end = end_of(self._params, token_id, position)
        if self.over is None:
            if token_id in self._ends and self._may_end:
                self.over = "grammar"
            elif self.matcher is None or not self.matcher.consume_token(token_id):
                self.over = "error"
                return "error"
            elif self.matcher.is_stopped():
                self.over = "grammar"
        return end or self.over

    def copy(self) -> SequenceGrammar:
        """Another one at the same position."""
        other = copy.copy(self)
        if self.matcher is not None:
            other.matcher = self.matcher.deep_copy()
        return other


def _bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    mask = np.zeros(mask_bytes(vocab_size), dtype=np.uint8)
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            mask[token_id >> 3] |= 1 << (token_id & 7)
    return mask
