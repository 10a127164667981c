"""Has the system give the memory of KV blocks before they are used.

Memory that nobody has written yet has no pages: the first write waits until the system has found and cleared one. Each
layer's keys and values lie apart, so that a single block begins dozens of huge pages; on a virtual machine, whose host
has to find them too, a step waited for 0.2 to 0.7 s. Blocks are first used in the order of their numbers, so a thread
can do it meanwhile for those that come next.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

from torch import Tensor

#: As much of each layer's keys, and of its values, is asked for at once: a huge page.
_BYTES_AT_ONCE = 2 << 20
#: Linux, since 5.14. Python has no name for it.
_MADV_POPULATE_WRITE = 23


class PageToucher:
    """For a cache tensor [layers, 2, num_blocks, ...] in host memory."""

    def __init__(self, kv: Tensor) -> None:
        self._kv = kv
        _, _, self._num_blocks, *_ = kv.shape
        self._block_bytes = kv[0, 0, 0].nbytes
        self._at_once = max(1, _BYTES_AT_ONCE // self._block_bytes)
        self._num_touched = 0
        self._thread: threading.Thread | None = None

    def stay_ahead_of(self, num_blocks: int) -> None:
        """The blocks below `num_blocks` are used: touch those of the next two rounds. Returns at once."""
        wanted = min(num_blocks + 2 * self._at_once, self._num_blocks)
        if self._num_touched < wanted and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._touch, args=(wanted,), name="page-toucher", daemon=True)
            self._thread.start()

    def _touch(self, wanted: int) -> None:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while self._num_touched < wanted:
            first, end = self._num_touched, min(self._num_touched + self._at_once, self._num_blocks)
            for part in range(self._kv.shape[0] * 2):
                begin = self._kv.data_ptr() + (part * self._num_blocks + first) * self._block_bytes
                start = begin - begin % mmap.PAGESIZE
                if madvise(start, begin + (end - first) * self._block_bytes - start, _MADV_POPULATE_WRITE):
                    # The system cannot, or has no more: the first write will tell.
                    end = self._num_blocks
                    break
            self._num_touched = end
