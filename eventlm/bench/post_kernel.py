"""A kernel behind each answer: what a client runs beside a server, to see that server on a loaded GPU."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from eventlm.errors import UsageError

#: Values for each multiprocessor of a GPU, which fill it; and in the interpreter, where each takes long.
_VALUES_A_PROCESSOR = 16 * 1024
_INTERPRETED_VALUES = 1024


class PostKernel:
    """A kernel of `rounds` rounds: called, it runs in a thread of its own, one at a time.

    It runs on GPU `local_rank` of this host, which ranks share if there are fewer, and where there is none in Triton's
    interpreter; `place` says which. The first call compiles it. Raises UsageError where there is no Triton.
    """

    def __init__(self, rounds: int, *, local_rank: int) -> None:
        self.is_on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
        if not self.is_on_gpu:
            # Triton reads it when it is imported.
            os.environ["TRITON_INTERPRET"] = "1"
        try:
            from eventlm.kernels.gpu.post_process import post_process
        except ImportError as error:
            raise UsageError("--post-kernel needs Triton: pip install 'eventlm[gpu]'") from error
        if self.is_on_gpu:
            self._device = torch.device("cuda", local_rank % torch.cuda.device_count())
            properties = torch.cuda.get_device_properties(self._device)
            self.place = properties.name
            num_values = _VALUES_A_PROCESSOR * properties.multi_processor_count
        else:
            self._device, num_values = torch.device("cpu"), _INTERPRETED_VALUES
            self.place = "the CPU, in Triton's interpreter, as there is no GPU"
        self._values = torch.ones(num_values, device=self._device)
        self._kernel = post_process
        self._rounds = rounds
        self._thread = ThreadPoolExecutor(1, "post-kernel")
        self._num_inside = 0
        self._drops = False

    async def __call__(self) -> int | None:
        """Run it, after those that wait already; its time in ns, from its launch to its end. None: it was dropped."""
        is_next = not self._num_inside
        self._num_inside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, is_next)
        finally:
            self._num_inside -= 1

    def drop_waiting(self) -> None:
        """Run none any more that has to wait for another."""
        self._drops = True

    def _run(self, is_next: bool) -> int | None:
        if self._drops and not is_next:
            return None
        if self.is_on_gpu:
            # Of this thread, to which Triton launches.
            torch.cuda.set_device(self._device)
        start_ns = time.monotonic_ns()
        self._kernel(self._values, iterations=self._rounds, mode="compute")
        if self.is_on_gpu:
            # Without it, the thread would wait in a loop that keeps a core busy.
            end = torch.cuda.Event(blocking=True)
            end.record(torch.cuda.current_stream(self._device))
            end.synchronize()
        return time.monotonic_ns() - start_ns
