"""Which shapes of steps a recorded run has seen: outside of them a fitted cost model extrapolates."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from eventlm.replay.cost.model import StepShape

_Bin = tuple[int, int, int]


class RecordedShapes:
    """Shapes by the powers of two of their prefill tokens, decodes and context tokens.

    A shape is inside if a recorded step is at most one power of two away in each of the three, and has prefill tokens
    and decodes exactly where it has.
    """

    def __init__(self, shapes: Iterable[StepShape]) -> None:
        self._bins: set[_Bin] = set()
        for prefill, decodes, context in {_bin(shape): None for shape in shapes}:
            self._bins.update(product(_neighbours(prefill), _neighbours(decodes), _neighbours(context)))

    def is_inside(self, shape: StepShape) -> bool:
        """Whether the run has steps like this one."""
        return _bin(shape) in self._bins


def _bin(shape: StepShape) -> _Bin:
    return shape.prefill_tokens.bit_length(), shape.num_decodes.bit_length(), shape.context_tokens.bit_length()


def _neighbours(length: int) -> tuple[int, ...]:
    """None is unlike any other number."""
    return (max(length - 1, 1), length, length + 1) if length else (0,)
