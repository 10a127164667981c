"""Chunks sized so that a step meets a target time (Medha's adaptive chunking, 2024)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from eventlm.core.plugin import Batcher, SequenceView, StepLoad, milliseconds_to_ns
from eventlm.core.predictor import Predictor


class Dynamic(Batcher, frozen=True, kw_only=True):
    """The largest chunk whose predicted step time meets a target; never less than `min_chunk_tokens`."""

    target_ms: Annotated[float, Meta(gt=0)] = 100
    #: Progress that a prompt makes in each step it is in, however long decodes alone take.
    min_chunk_tokens: Annotated[int, Meta(ge=1)] = 16

    def chunk_tokens(self, load: StepLoad, sequence: SequenceView, max_tokens: int, predictor: Predictor) -> int:
        target_ns = milliseconds_to_ns(self.target_ms)
        fits = load.largest_chunk(predictor, target_ns, sequence.done_tokens, max_tokens)
        return min(max(fits, self.min_chunk_tokens), max_tokens)
