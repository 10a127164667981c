"""The residual stream of a step, from a rank of one stage to the rank of the next that computes on.

A stage never waits for the next one. There is room for as many steps as can be in flight, one more than there are
stages, and a step is only launched once an earlier one has come out at the last stage.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eventlm.worker.runner import PeerLostError

#: How often one looks for what the other makes at its start.
_POLL_S = 0.01
#: Of the ring: how many steps have been taken out. On a cache line of its own.
_HEAD_BYTES = 64
#: Where each residual stream begins.
_ALIGNMENT = 64


class HandedOver(NamedTuple):
    """A step so far: when each stage up to here began and ended, on its own host's clock, and what it gave.

    residual_TH: of the step's tokens, [T, hidden_size].
    """

    step: int
    times_ns: tuple[tuple[int, int], ...]
    residual_TH: Tensor


class HandOverSender(Protocol):
    """To the next stage."""

    def send(self, handed: HandedOver) -> None:
        """Returns at once. Raises PeerLostError if the one that is to have it is gone."""
        ...


class HandOverReceiver(Protocol):
    """From the stage before."""

    def wait(self, timeout_s: float) -> bool:
        """Whether `take` has something to give, or to raise, within this time."""
        ...

    def take(self) -> HandedOver:
        """The oldest step that was sent and not taken yet. Waits for it. Raises PeerLostError if the sender is gone."""
        ...


def pack_header(handed: HandedOver) -> bytes:
    """All but the residual stream, and how many tokens that has."""
    times = [time_ns for both in handed.times_ns for time_ns in both]
    return struct.pack(f"<{2 + len(times)}q", handed.step, len(handed.residual_TH), *times)


def unpack_header(header: bytes) -> tuple[int, tuple[tuple[int, int], ...], int]:
    """The step, the times and the number of tokens of what `pack_header` gave."""
    step, num_tokens, *times = struct.unpack(f"<{len(header) // 8}q", header)
    return step, tuple(zip(times[::2], times[1::2], strict=True)), num_tokens


def header_bytes(num_stages: int) -> int:
    """The length of a header with the times of so many stages."""
    return 16 * (1 + num_stages)


class _Ring:
    """Slots of shared memory, [max_tokens, hidden_size] each, which are used in turn, and a pipe for the headers.

    One call can wait for a pipe and for the end of the process at its other side. A reader of a header sees what was
    written to memory before it.
    """

    def __init__(
        self, path: Path, *, num_slots: int, max_tokens: int, hidden_size: int, dtype: torch.dtype, is_new: bool
    ) -> None:
        row_bytes = hidden_size * dtype.itemsize
        slot_bytes = -(-max_tokens * row_bytes // _ALIGNMENT) * _ALIGNMENT
        num_bytes = _HEAD_BYTES + num_slots * slot_bytes
        if is_new:
            _make_file(path, num_bytes)
        memory = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        self._taken = memory[:8].view(torch.int64)
        slots = memory[_HEAD_BYTES:].view(num_slots, slot_bytes)[:, : max_tokens * row_bytes]
        self._slots = [slot.view(dtype).view(max_tokens, hidden_size) for slot in slots]
        #: How many steps have been put in, or taken out, by this side.
        self._count = 0

    def next_slot(self) -> Tensor:
        """The one that is used next."""
        slot: Tensor = self._slots[self._count % len(self._slots)]
        return slot


class SharedSender(_Ring):
    """A `HandOverSender` to a rank of the same host, whose SharedReceiver has been made with the same numbers.

    folder: where both find what they share, under this name. Waits for the other at its start.
    """

    def __init__(
        self, folder: Path, name: str, *, num_slots: int, max_tokens: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        pipe = folder / f"{name}.pipe"
        while not pipe.exists():
            time.sleep(_POLL_S)
        super().__init__(
            folder / name,
            num_slots=num_slots,
            max_tokens=max_tokens,
            hidden_size=hidden_size,
            dtype=dtype,
            is_new=False,
        )
        try:
            self._pipe = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise _next_is_gone() from error
        # Says that there is a sender, whose end can be seen from here on.
        os.write(self._pipe, b"\0")

    def send(self, handed: HandedOver) -> None:
        """As `HandOverSender` says."""
        self._wait_for_room()
        self.next_slot()[: len(handed.residual_TH)].copy_(handed.residual_TH)
        try:
            # Short enough for a pipe to take it whole.
            os.write(self._pipe, pack_header(handed))
        except BrokenPipeError as error:
            raise _next_is_gone() from error
        self._count += 1

    def _wait_for_room(self) -> None:
        """There is room, unless more steps are in flight than were announced."""
        poller: select.poll | None = None
        while self._count - int(self._taken) >= len(self._slots):
            if poller is None:
                poller = select.poll()
                poller.register(self._pipe, 0)
            if poller.poll(1):
                raise _next_is_gone()

    def close(self) -> None:
        """The other sees that nothing more comes."""
        os.close(self._pipe)


class SharedReceiver(_Ring):
    """A `HandOverReceiver` from a rank of the same host, the `stage` before; makes what both share.

    OSError if there is no room for it.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        num_slots: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        stage: int,
    ) -> None:
        super().__init__(
            folder / name, num_slots=num_slots, max_tokens=max_tokens, hidden_size=hidden_size, dtype=dtype, is_new=True
        )
        self._header_bytes = header_bytes(stage + 1)
        # The other looks for the last name, under which there is one to read what it writes.
        fresh, pipe = folder / f"{name}.fresh", folder / f"{name}.pipe"
        os.mkfifo(fresh, 0o600)
        self._pipe = os.open(fresh, os.O_RDONLY | os.O_NONBLOCK)
        fresh.rename(pipe)
        self._poller = select.poll()
        self._poller.register(self._pipe, select.POLLIN)
        self._has_sender = False

    def wait(self, timeout_s: float) -> bool:
        """As `HandOverReceiver` says."""
        if not self._has_sender:
            # Before there is one, a pipe looks as after its end.
            with contextlib.suppress(BlockingIOError):
                self._has_sender = bool(os.read(self._pipe, 1))
            if not self._has_sender:
                time.sleep(min(timeout_s, _POLL_S))
                return False
        return bool(self._poller.poll(timeout_s * 1000))

    def take(self) -> HandedOver:
        """As `HandOverReceiver` says."""
        while not self.wait(1.0):
            pass
        header = os.read(self._pipe, self._header_bytes)
        if not header:
            raise PeerLostError("the rank of the stage before is gone")
        step, times_ns, num_tokens = unpack_header(header)
        # A copy, for the slot is used again.
        residual_TH = self.next_slot()[:num_tokens].clone()
        self._count += 1
        self._taken.fill_(self._count)
        return HandedOver(step, times_ns, residual_TH)

    def close(self) -> None:
        """The other sees that nothing more is taken."""
        os.close(self._pipe)


def _make_file(path: Path, num_bytes: int) -> None:
    number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            # Else a full file system would show as a signal, in the middle of a step.
            os.posix_fallocate(number, 0, num_bytes)
        else:
            os.ftruncate(number, num_bytes)
    finally:
        os.close(number)


def _next_is_gone() -> PeerLostError:
    return PeerLostError("the rank of the next stage is gone")
