"""Very long prefills leave part of each step to short ones while they can afford it (Medha's space sharing, 2024).

A prompt is very long if it holds up the others for long: by its predicted prefill time against the target time of a
step. A limit in tokens would mean seconds on one machine and milliseconds on another.

The step is shared both by time and by tokens, because if the token budget ends a step before its target time does, a
share of the time alone would leave nothing.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from eventlm.core.plugin import Batcher, SequenceView, StepLoad, milliseconds_to_ns
from eventlm.core.predictor import Predictor
from eventlm.types import parts_per_million

MILLION = 1_000_000


class SpaceSharing(Batcher, frozen=True, kw_only=True):
    """Like dynamic, but a very long prefill leaves a share of the step to others: its slack over its deadline.

    At most `max_share`; a prefill is very long if it alone would take more than `min_long_steps` target times.
    """

    target_ms: Annotated[float, Meta(gt=0)] = 100
    #: Progress that a prompt makes in each step it is in, however long decodes alone take.
    min_chunk_tokens: Annotated[int, Meta(ge=1)] = 16
    min_long_steps: Annotated[int, Meta(ge=0)] = 10
    max_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    #: As in edf and lrs: the deadline of a request that brought none. Slack is measured against it.
    multiplier: Annotated[float, Meta(gt=0)] = 1.5
    min_deadline_ms: Annotated[float, Meta(ge=1)] = 500

    def chunk_tokens(self, load: StepLoad, sequence: SequenceView, max_tokens: int, predictor: Predictor) -> int:
        target_ns = milliseconds_to_ns(self.target_ms)
        wanted = max_tokens
        if sequence.prefill_ns > self.min_long_steps * target_ns:
            own_ppm = MILLION - self._share_ppm(sequence, load.now_ns)
            target_ns = target_ns * own_ppm // MILLION
            if load.budget_tokens:
                wanted = min(wanted, max(load.budget_tokens * own_ppm // MILLION - load.num_tokens, 0))
        fits = load.largest_chunk(predictor, target_ns, sequence.done_tokens, wanted)
        return min(max(fits, self.min_chunk_tokens), max_tokens)

    def _share_ppm(self, sequence: SequenceView, now_ns: int) -> int:
        """Slack as a part of the relative deadline, from 0 to `max_share`."""
        deadline = parts_per_million(self.multiplier), milliseconds_to_ns(self.min_deadline_ms)
        slack_ns = sequence.slack_ns(now_ns, *deadline)
        slack_ppm = slack_ns * MILLION // sequence.relative_deadline_ns(*deadline)
        return min(max(slack_ppm, 0), parts_per_million(self.max_share))
