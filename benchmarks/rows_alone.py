"""Re-execution with every row in a step of its own: a control in which low precisions must give other tokens."""

from __future__ import annotations

from msgspec import structs

from eventlm.events import Launched
from eventlm.events.codec import encode_body
from eventlm.replay.execute.workers import Workers
from eventlm.worker.protocol import StepPayload, StepResult


class RowsAlone:
    """Runs each row of a step in a step of its own, in the order of the rows, on the given workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.lose = workers.lose
        self.host_differences = workers.host_differences
        self.close = workers.close

    async def run(self, launched: Launched, body: bytes, payload: StepPayload) -> StepResult:
        """The results of all rows as one result."""
        parts = _split(launched)
        if len(parts) < 2:
            return await self._workers.run(launched, body, payload)
        tokens, ends = [], []
        for row, part in enumerate(parts):
            forced = payload.forced[row : row + 1]
            # All new sequences are sent at once, because a worker looks rows up among those it holds.
            own = StepPayload(new=payload.new if row == 0 else [], forced=forced)
            result = await self._workers.run(part, encode_body(part), own)
            tokens += result.tokens
            ends += [(row, reason) for _, reason in result.ends]
        return StepResult(epoch=launched.epoch, step=launched.step, start_ns=0, end_ns=0, tokens=tokens, ends=ends)


def _split(launched: Launched) -> list[Launched]:
    num_decodes = len(launched.decodes)
    parts = []
    for row in range(num_decodes + len(launched.chunks)):
        is_decode = row < num_decodes
        chunks = [] if is_decode else [launched.chunks[row - num_decodes]]
        parts.append(
            structs.replace(
                launched,
                decodes=[launched.decodes[row]] if is_decode else [],
                chunks=chunks,
                most=launched.most[row : row + 1],
                blocks=[(0, first, numbers) for of, first, numbers in launched.blocks if of == row],
                forget=launched.forget if row == 0 else [],
                states=[(0, *what) for of, *what in launched.states if of == row],
                num_tokens=1 if is_decode else chunks[0][3],
            )
        )
    return parts
