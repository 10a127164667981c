"""Chunks as large as the step's token budget allows."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from eventlm.core.plugin import Batcher, SequenceView, StepLoad
from eventlm.core.predictor import Predictor


class Fixed(Batcher, frozen=True, kw_only=True):
    """A fixed token budget a step: chunks take what decodes and earlier chunks leave of it."""

    #: Most tokens of one chunk; 0: the budget alone decides.
    max_chunk_tokens: Annotated[int, Meta(ge=0)] = 0

    def chunk_tokens(self, load: StepLoad, sequence: SequenceView, max_tokens: int, predictor: Predictor) -> int:
        return min(max_tokens, self.max_chunk_tokens) if self.max_chunk_tokens > 0 else max_tokens
