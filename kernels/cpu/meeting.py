"""Where processes that compute parts of one thing meet and exchange them (meeting.h), from Python and compiled code.

All members of a group must come to the same meetings in the same order, with tensors of the same shape. A group whose
member is gone waits for it; `leave` ends it for all.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from eventlm.kernels import host_memory
from eventlm.kernels.cpu.native import CARRY, MeetingEndedError, available_builds, library

#: How long a member that waits may keep looking before it sleeps: where all threads of the group have processors of
#: their own, and where they have not, so that it would keep one from who it waits for.
SPIN_US, SHARED_SPIN_US = 2_000, 50
_FLOAT_BYTES = 4
_LINE_BYTES = 128
#: Of the rows that compiled code puts into a slot, see decoder.h's hidden_stride_.
_ROW_FLOATS, _ROW_MULTIPLE = 16, 32


class PeerGroup(Protocol):
    """How a member of a group of `size` sees it. number: its own, from 0 on. slot_bytes: what one meeting exchanges."""

    size: int
    number: int
    slot_bytes: int
    #: Of a Meeting in meeting.h, as long as this lives.
    handle: int

    def gather(self, mine: Tensor) -> Tensor:
        """[size, ...] in the order of the members, from each of them one like `mine`.

        Valid until the next meeting. Raises MeetingEndedError.
        """
        ...

    def barrier(self) -> None:
        """Returns when all members are here. Raises MeetingEndedError."""
        ...

    def failure(self) -> BaseException | None:
        """What the transport raised at the last meeting, if that is why there was none."""
        ...

    def leave(self) -> None:
        """End the group, from any thread: what waits or comes later raises MeetingEndedError."""
        ...


def slot_bytes_for(max_tokens: int, hidden_size: int, vocab_rows: int = 0) -> int:
    """The slot that a step of so many tokens needs: float32 [max_tokens, hidden_size], each row a little longer.

    vocab_rows: the most that a member has of a vocabulary that is split. Logits of a token need room for as many.
    """
    row = -(-hidden_size // _ROW_MULTIPLE) * _ROW_MULTIPLE + _ROW_FLOATS
    return max(max_tokens * row, vocab_rows) * _FLOAT_BYTES


def create_segment(path: str | Path, *, size: int, slot_bytes: int) -> None:
    """Make the file where the members of a group meet, once, before any of them starts. It serves one life of theirs.

    path: in a file system in memory, such as /dev/shm. Raises FileExistsError, and OSError if it has no room.
    """
    num_bytes = _segment_bytes(size, slot_bytes)
    number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            # Else a full file system would show as a signal, in the middle of a step.
            os.posix_fallocate(number, 0, num_bytes)
        else:
            os.ftruncate(number, num_bytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(number)


class _Group:
    """What both kinds have."""

    def __init__(self, size: int, number: int, slot_bytes: int) -> None:
        if not 0 <= number < size:
            raise ValueError(f"member {number} of a group of {size}")
        self.size, self.number, self.slot_bytes = size, number, slot_bytes
        self._functions = library(available_builds()[0])
        self.handle = 0

    def _own(self, handle: int | None) -> None:
        if not handle:
            raise MemoryError
        self.handle = handle
        self._free = weakref.finalize(self, self._functions.eventlm_free_meeting, handle)

    @property
    def num_meetings(self) -> int:
        """How often the group has met so far."""
        number: int = self._functions.eventlm_num_meetings(self.handle)
        return number

    def barrier(self) -> None:
        self._meet(0)

    def failure(self) -> BaseException | None:
        return None

    def leave(self) -> None:
        self._functions.eventlm_leave(self.handle)

    def _meet(self, num_bytes: int) -> None:
        try:
            self._functions.eventlm_meet(self.handle, num_bytes)
        except MeetingEndedError as error:
            raise error from self.failure()

    def _gather(self, mine: Tensor) -> Tensor:
        """In as many meetings as it takes."""
        mine = mine.contiguous()
        everything = torch.empty((self.size, *mine.shape), dtype=mine.dtype)
        try:
            self._functions.eventlm_gather(self.handle, mine.data_ptr(), mine.nbytes, everything.data_ptr())
        except MeetingEndedError as error:
            raise error from self.failure()
        return everything

    def close(self) -> None:
        """Leave if others still wait, and give back what it has. Nothing may be called afterwards."""
        if self._free.alive:
            self.leave()
            self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Meeting(_Group):
    """A group of processes of one host, which share the memory of a file that `create_segment` made.

    spin_us: how long a member that waits keeps looking before it sleeps.

    Raises ValueError if the file is not of this size, or if another member has come with this number; LookupError
    where no build of the compiled code can run.
    """

    def __init__(
        self, path: str | Path, *, size: int, number: int, slot_bytes: int, spin_us: int = SHARED_SPIN_US
    ) -> None:
        super().__init__(size, number, slot_bytes)
        num_bytes = _segment_bytes(size, slot_bytes)
        if (found := Path(path).stat().st_size) != num_bytes:
            raise ValueError(f"{path}: has {found} bytes, {size} members with slots of {slot_bytes} need {num_bytes}")
        self._memory = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        handle = self._functions.eventlm_meeting(self._memory.data_ptr(), size, number, slot_bytes, 1000 * spin_us)
        if not handle:
            raise ValueError(f"{path}: member {number} has been here before")
        self._own(handle)
        first, second = (self._functions.eventlm_part(handle, member) for member in (0, 1))
        self._step = second - first
        # Head and Line in meeting.h, whose first number is that of meetings that a member has come to.
        self._rounds = self._memory[: (1 + size) * _LINE_BYTES].view(torch.int32)[_LINE_BYTES // 4 :: _LINE_BYTES // 4]

    @property
    def is_waiting(self) -> bool:
        """Whether it has come to a meeting to which another member has not. To be read in any thread."""
        rounds: list[int] = self._rounds.tolist()
        return any(rounds[self.number] - each > 0 for each in rounds)

    def gather(self, mine: Tensor) -> Tensor:
        """As `PeerGroup` says; a view of the shared memory if it fits into a slot."""
        if mine.nbytes > self.slot_bytes or not mine.numel():
            return self._gather(mine)
        self._slots(self._functions.eventlm_slot(self.handle), mine, 1)[0].copy_(mine)
        self._meet(mine.nbytes)
        return self._slots(self._functions.eventlm_part(self.handle, 0), mine, self.size)

    def _slots(self, address: int, like: Tensor, count: int) -> Tensor:
        """Of each of `count` slots from `address` on what a tensor like this takes."""
        first = (address - self._memory.data_ptr()) // like.itemsize
        memory = self._memory.view(like.dtype)
        return memory.as_strided((count, *like.shape), (self._step // like.itemsize, *_strides(like.shape)), first)


class CarriedMeeting(_Group):
    """A group whose bytes something else carries, as between hosts.

    carry(mine, everything): mine is uint8 [n], everything uint8 [size, n], which it fills with those of all members
    in their order. Compiled code calls it from threads of its own. What it raises ends the group for this member, and
    is what the MeetingEndedError comes from. `leave` does not wake a member that waits in it.
    """

    def __init__(self, carry: Callable[[Tensor, Tensor], None], *, size: int, number: int, slot_bytes: int) -> None:
        super().__init__(size, number, slot_bytes)
        self._mine = host_memory.zeros((slot_bytes,), torch.uint8)
        self._all = host_memory.zeros((size * slot_bytes,), torch.uint8)
        self._failure: BaseException | None = None
        mine, everything, failed = self._mine, self._all, self._failed

        def call(_context: int, _mine: int, _all: int, num_bytes: int) -> int:
            # No exception passes through compiled code.
            try:
                carry(mine[:num_bytes], everything[: size * num_bytes].view(size, num_bytes))
            except BaseException as error:
                failed(error)
                return 1
            return 0

        self._call = CARRY(call)
        self._own(
            self._functions.eventlm_carried_meeting(
                mine.data_ptr(), everything.data_ptr(), self._call, None, size, number, slot_bytes
            )
        )

    def failure(self) -> BaseException | None:
        return self._failure

    def gather(self, mine: Tensor) -> Tensor:
        """As `PeerGroup` says."""
        return self._gather(mine)

    def _failed(self, error: BaseException) -> None:
        self._failure = error


def _segment_bytes(size: int, slot_bytes: int) -> int:
    number: int = library(available_builds()[0]).eventlm_segment_bytes(size, slot_bytes)
    return number


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
