"""The states that layers keep of all sequences on a worker, in slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eventlm.errors import UsageError
from eventlm.kernels import host_memory
from eventlm.kernels.sequence_states import StateRow, StepStates
from eventlm.models.config import state_bytes
from eventlm.models.spec import ModelSpec
from eventlm.worker.cache_engine import CacheMemoryError
from eventlm.worker.sequence_table import Row


class StateCache:
    """The tensor `memory`, float32 [slots, state_size]; of a model without such layers it is empty.

    The forward pass that runs the layers decides how a state lies in its slot.
    """

    def __init__(self, config: ModelSpec, num_slots: int) -> None:
        if config.state_size and not num_slots:
            raise UsageError(f"this {config.architecture} keeps states of sequences; give --state-slots")
        try:
            self.memory = host_memory.zeros((num_slots, config.state_size), torch.float32)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise CacheMemoryError(
                f"{num_slots} slots for the states of sequences need {num_slots * state_bytes(config) >> 20:,} MiB, "
                "more than this machine gives; lower --state-slots or --max-num-seqs"
            ) from error

    def step(self, rows: Sequence[Row]) -> StepStates:
        """What becomes of the states in a step of these rows."""
        if not self.memory.shape[1]:
            return StepStates(self.memory, ())
        return StepStates(self.memory, [_state_row(row) for row in rows])


def _state_row(row: Row) -> StateRow:
    copies = [(position - row.start, slot) for position, slot in row.state_copies]
    return StateRow(row.num_tokens, row.sequence.state_slot, row.state_source, copies)
