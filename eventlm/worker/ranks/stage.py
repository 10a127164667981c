"""A rank's place in the pipeline of its replica: what a step gets from the stage before, and gives to the next."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from eventlm.worker.ranks.hand_over import HandedOver, HandOverReceiver, HandOverSender

#: How long one look for the stage before takes, in which other messages wait.
_LOOK_S = 0.001


class StageInput:
    """What a step begins with: the times of the stages before, and what they gave; None at the first stage."""

    __slots__ = ("residual_TH", "start_ns", "times_ns")

    def __init__(self, handed: HandedOver | None = None) -> None:
        self.residual_TH = handed.residual_TH if handed is not None else None
        self.times_ns = handed.times_ns if handed is not None else ()
        self.start_ns = time.monotonic_ns()


class Stage:
    """The first one has no `before`, the last one no `after`; of a model in one piece it is both.

    hidden_size, dtype: of the residual stream.
    """

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        before: HandOverReceiver | None = None,
        after: HandOverSender | None = None,
    ) -> None:
        self._hidden_size, self._dtype = hidden_size, dtype
        self._before, self._after = before, after
        self._is_alone = False
        #: Whether the last look for the stage before found nothing. Read in any thread.
        self.is_waiting = False

    @property
    def is_first(self) -> bool:
        """Whether steps begin here, with token ids."""
        return self._before is None

    @property
    def is_last(self) -> bool:
        """Whether steps end here, with tokens."""
        return self._after is None

    def has_input(self) -> bool:
        """Whether the stage before has given the next step, or is gone. Waits a moment for it."""
        is_there = self._before is None or self._before.wait(_LOOK_S)
        self.is_waiting = not is_there
        return is_there

    def begin(self, step: int, num_tokens: int) -> StageInput:
        """Wait for what the stage before gives of a step. Raises PeerLostError."""
        if self._before is None:
            return StageInput()
        if self._is_alone:
            return StageInput(HandedOver(step, (), self._stand_in(num_tokens)))
        self.is_waiting = True
        handed = self._before.take()
        self.is_waiting = False
        if handed.step != step or len(handed.residual_TH) != num_tokens:
            raise RuntimeError(
                f"step {step} of {num_tokens} tokens got step {handed.step} of {len(handed.residual_TH)} from the "
                "stage before"
            )
        return StageInput(handed)

    def end(self, step: int, given: StageInput, hidden_TH: Tensor) -> None:
        """Hand a step over to the next stage, which there is. Raises PeerLostError."""
        assert self._after is not None
        if not self._is_alone:
            self._after.send(HandedOver(step, self.times_ns(given), hidden_TH))

    def times_ns(self, given: StageInput) -> tuple[tuple[int, int], ...]:
        """When each stage of a step that ends now began and ended; empty where there is one stage."""
        if self.is_first and self.is_last:
            return ()
        return (*given.times_ns, (given.start_ns, time.monotonic_ns()))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Steps begin meanwhile with numbers that stand in for those of the stage before, and end here."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def _stand_in(self, num_tokens: int) -> Tensor:
        """No two tokens are alike, else all would choose the same experts."""
        generator = torch.Generator().manual_seed(num_tokens)
        return torch.randn(num_tokens, self._hidden_size, generator=generator).to(self._dtype)
