"""Has the system give the memory of KV blocks before they are used.

Memory that has not been written has no pages: the first write waits until the system has found and cleared one. Each
layer's keys and values lie apart, so that a single block begins dozens of huge pages; on a virtual machine, whose host
has to find them too, a step waited for 0.2 to 0.7 s. Blocks are first used in the order of their numbers, so it can be
done for those that come next: beside the reading of the weights, while the worker has no step to run, and where steps
come without a pause in a thread beside them, which makes them a tenth longer.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence

from torch import Tensor

from eventlm.types import ceil_div

#: As much of each layer's keys, and of its values, is asked for at once: a huge page.
_BYTES_AT_ONCE = 2 << 20
#: Of all layers together, ahead of use, while there is time: some thousand tokens of a large model.
_BYTES_AHEAD = 1 << 30
#: Linux, since 5.14. Python has no name for it.
_MADV_POPULATE_WRITE = 23


class PageToucher:
    """For layers' keys and values in host memory, each a tensor [2, num_blocks, ...]; there may be no such layers."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        #: Each layer's keys, and its values.
        self._parts = [part for layer in layers for part in layer]
        self._num_blocks = len(self._parts[0]) if self._parts else 0
        block_bytes = [part[0].nbytes for part in self._parts] or [_BYTES_AT_ONCE]
        self._at_once = max(1, _BYTES_AT_ONCE // max(block_bytes))
        self._ahead = max(2 * self._at_once, _BYTES_AHEAD // sum(block_bytes))
        self._num_used = 0
        self._num_touched = 0
        #: Of the next round, how many of the parts have been touched.
        self._num_parts = 0
        self._madvise = getattr(ctypes.CDLL(None), "madvise", None)
        if self._madvise is not None:
            self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Touch the first round, in a thread."""
        self._start(self._at_once)

    def wait(self) -> None:
        """Until the thread is done."""
        if self._thread is not None:
            self._thread.join()

    def stay_ahead_of(self, num_blocks: int) -> None:
        """The blocks below `num_blocks` are used: touch two rounds of the next ones if few are. Returns at once.

        Few are less than the next step uses if it is like this one, and half a round: a short first request need not
        share memory with the thread.
        """
        num_new, self._num_used = num_blocks - self._num_used, num_blocks
        if self._wants(num_new + ceil_div(self._at_once, 2)) and not self._is_running():
            self._start(2 * self._at_once)

    def touch_some(self) -> bool:
        """To be called while there is nothing to compute: touch a little more, in a millisecond or two.

        While the thread does it, there is nothing to do here. False if there is enough for now.
        """
        if self._is_running():
            return True
        if not self._wants(self._ahead):
            return False
        self._touch_part()
        return True

    def _wants(self, num_blocks: int) -> bool:
        return self._num_touched < min(self._num_used + num_blocks, self._num_blocks)

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, num_blocks: int) -> None:
        self._thread = threading.Thread(target=self._catch_up, args=(num_blocks,), name="page-toucher", daemon=True)
        self._thread.start()

    def _catch_up(self, num_blocks: int) -> None:
        while self._wants(num_blocks):
            self._touch_part()

    def _touch_part(self) -> None:
        """One layer's keys, or values, in the next round of blocks; one thread at a time."""
        end = min(self._num_touched + self._at_once, self._num_blocks)
        blocks = self._parts[self._num_parts][self._num_touched : end]
        start = blocks.data_ptr() - blocks.data_ptr() % mmap.PAGESIZE
        num_bytes = blocks.data_ptr() + blocks.nbytes - start
        if self._madvise is None or self._madvise(start, num_bytes, _MADV_POPULATE_WRITE):
            # The system cannot, or has no more memory: then the first write fails.
            self._num_touched = self._num_blocks
            return
        self._num_parts += 1
        if self._num_parts == len(self._parts):
            self._num_parts, self._num_touched = 0, end
