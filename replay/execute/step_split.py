"""Steps of one row each: the same work in another batching, as a control of what a batch's shape does to tokens."""

from __future__ import annotations

from msgspec import structs

from eventlm.events import Launched
from eventlm.events.codec import encode_body
from eventlm.replay.execute.workers import Workers
from eventlm.worker.protocol import StepPayload, StepResult


class RowsAlone:
    """Runs each row of a step in a step of its own, in the order of the rows, with the workers of another."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def run(self, launched: Launched, body: bytes, payload: StepPayload) -> StepResult:
        """The results of all rows as that of the step."""
        parts = _split(launched)
        if len(parts) < 2:
            return await self._workers.run(launched, body, payload)
        tokens, ends = [], []
        for row, part in enumerate(parts):
            forced = payload.forced[row : row + 1]
            # What is new is sent at once: rows are looked up among what the worker holds.
            own = StepPayload(new=payload.new if row == 0 else [], forced=forced)
            result = await self._workers.run(part, encode_body(part), own)
            tokens += result.tokens
            ends += [(row, reason) for _, reason in result.ends]
        return StepResult(epoch=launched.epoch, step=launched.step, start_ns=0, end_ns=0, tokens=tokens, ends=ends)

    async def lose(self, replica: int) -> None:
        """As of the other."""
        await self._workers.lose(replica)

    def host_differences(self) -> list[str]:
        """As of the other."""
        return self._workers.host_differences()

    async def close(self) -> None:
        """As of the other."""
        await self._workers.close()


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
                blocks=[(0, place, numbers) for of, place, numbers in launched.blocks if of == row],
                forget=launched.forget if row == 0 else [],
                num_tokens=1 if is_decode else chunks[0][3],
            )
        )
    return parts
