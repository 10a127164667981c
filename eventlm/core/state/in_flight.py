"""The steps that are in flight in a snapshot of the core's state, as launches."""

from __future__ import annotations

from collections import Counter

from eventlm.core.state.snapshot import ReplicaSnapshot, StateSnapshot, StepSnapshot
from eventlm.events import Launched


def launches_in_flight(taken: StateSnapshot) -> list[Launched]:
    """The launches of all steps in flight, in their order, with the rows and sizes that they had.

    Their time is that of the snapshot, which does not have their own, and what their workers must write and forget is
    left out. A row of a sequence that has ended has no context.
    """
    num_tokens = {
        (request.arrival.s, row.index): row.num_tokens for request in taken.requests for row in request.sequences
    }
    found = []
    for index, replica in enumerate(taken.replicas):
        #: Rows of each sequence in the steps before.
        ahead: Counter[tuple[int, int]] = Counter()
        for step in replica.steps:
            found.append(_launch(taken, index, replica, step, num_tokens, ahead))
            ahead.update((request, position) for request, position, *_ in [*step.decodes, *step.chunks])
    return sorted(found, key=lambda launched: launched.s)


def _launch(
    taken: StateSnapshot,
    index: int,
    replica: ReplicaSnapshot,
    step: StepSnapshot,
    num_tokens: dict[tuple[int, int], int],
    ahead: Counter[tuple[int, int]],
) -> Launched:
    decodes = [(*identity, num_tokens.get(identity, 0), ahead[identity]) for identity in step.decodes]
    samples = step.most[len(decodes) :]
    chunks = [
        (request, position, start, end - start, most)
        for (request, position, start, end, _), most in zip(step.chunks, samples, strict=True)
    ]
    return Launched(
        s=step.launch_seq,
        ts=taken.now_ns,
        replica=index,
        epoch=replica.epoch,
        step=step.step,
        decodes=decodes,
        chunks=chunks,
        num_tokens=len(decodes) + sum(chunk[3] for chunk in chunks),
        predicted_ns=step.predicted_ns,
    )
