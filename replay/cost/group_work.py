"""What each KV group of a replica computes of a step.

A launch says by the numbers of its blocks which group holds what, but has only the blocks that are new. Where a
sequence begins is therefore kept from the launch that has its first block; the rest follows from its length.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from eventlm.config import CoreConfig
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor, StepShape
from eventlm.core.shards import group_of
from eventlm.core.state.kv_groups import tokens_in_group
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import Launched

#: Says which of several groups has most to do, before anything is known of their speed.
_USUAL = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)


class GroupWork(Struct, frozen=True):
    """A group's part of a step. parts: what other groups send it of rows that they compute too, in rows."""

    shape: StepShape
    parts: int = 0


def shape_of(launched: Launched) -> StepShape:
    """The shape of a launch whose decodes take one token each; of several KV groups, of what all compute together."""
    context_tokens = sum([confirmed + in_flight for _, _, confirmed, in_flight in launched.decodes])
    shape = StepShape(num_decodes=len(launched.decodes), context_tokens=context_tokens)
    for _, _, start, num_tokens, _ in launched.chunks:
        shape.add_chunk(start, num_tokens)
    return shape


def most_of(works: Sequence[GroupWork]) -> StepShape:
    """The shape of the group that has most to do."""
    if len(works) == 1:
        return works[0].shape
    return max((work.shape for work in works), key=_USUAL.step_ps)


class WorkOfSteps:
    """Takes the launches of replicas in order. cores: the limits of each replica, by its number."""

    def __init__(self, cores: Sequence[CoreConfig]) -> None:
        self._cores = cores
        #: The group of the first block of each sequence, by (replica, request, index).
        self._first_groups: dict[tuple[int, int, int], int] = {}

    def resume(self, state: StateSnapshot) -> None:
        """Begin in the middle of a run."""
        for request in state.requests:
            for row in request.sequences:
                if row.block_table:
                    self._begin(row.replica, request.arrival.s, row.index, row.block_table[0])

    def _begin(self, replica: int, request: int, index: int, block: int) -> None:
        self._first_groups[replica, request, index] = block // self._cores[replica].num_blocks

    def of(self, launched: Launched) -> list[GroupWork]:
        """What each group computes; without groups, what the worker does."""
        replica = launched.replica
        config = self._cores[replica]
        if config.groups == 1:
            return [GroupWork(shape_of(launched))]
        for request, index in launched.forget:
            self._first_groups.pop((replica, request, index), None)
        rows = [*launched.decodes, *launched.chunks]
        for row, at, blocks in launched.blocks:
            if at == 0:
                self._begin(replica, rows[row][0], rows[row][1], blocks[0])
        shapes, parts = [StepShape() for _ in range(config.groups)], [0] * config.groups
        for request, index, confirmed, in_flight in launched.decodes:
            # The last of its tokens is the one that the row stores.
            contexts, own = self._contexts(replica, request, index, confirmed + in_flight - 1)
            for group, num_tokens in contexts:
                shapes[group].num_decodes += 1
                shapes[group].context_tokens += num_tokens + (group == own)
                parts[group] += len(contexts) - 1
        for request, index, start, num_tokens, _ in launched.chunks:
            contexts, own = self._contexts(replica, request, index, start)
            for group, before in contexts:
                shapes[group].add_chunk(before, num_tokens, own_tokens=num_tokens if group == own else 0)
                parts[group] += num_tokens * (len(contexts) - 1)
        return [GroupWork(*each) for each in zip(shapes, parts, strict=True)]

    def _contexts(self, replica: int, request: int, index: int, before: int) -> tuple[list[tuple[int, int]], int]:
        """What each of the groups that compute a row holds of the tokens before it, and which one stores the row."""
        config = self._cores[replica]
        # Not known of one that has lost its blocks since: its step was in flight where a log or a branch begins.
        first = self._first_groups.get((replica, request, index), 0)
        own = group_of(before, first, config.kv_shard_tokens or config.block_size, config.groups)
        held = [(group, tokens_in_group(config, first, group, before)) for group in range(config.groups)]
        return [each for each in held if each[1] or each[0] == own], own
