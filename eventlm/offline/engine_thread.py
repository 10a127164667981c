"""Runs an engine and its event loop in a thread, so that callers may or may not have a loop of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import EngineUnavailableError

T = TypeVar("T")

#: Longest delay of a signal while the caller waits. If the kernel delivers it to another thread, it does not end an
#: untimed wait of this one.
_SIGNAL_SECONDS = 0.5


class EngineThread(threading.Thread):
    """Runs an engine from `start_engine` to `stop`, which must be called once. Never delays the exit."""

    def __init__(self, engine: InferenceEngine) -> None:
        super().__init__(name="eventlm", daemon=True)
        self.engine = engine
        # As in the server. It can start processes whatever event loop policy the program has set.
        self._loop = uvloop.new_event_loop()
        self._pid = os.getpid()
        #: Guards `_stopping`: the loop gets all submitted work before it is stopped.
        self._lock = threading.Lock()
        self._stopping = False

    def start_engine(self) -> None:
        """Start the thread and the engine. Raises the engine's errors."""
        self.start()
        self.result(self.submit(self.engine.start()))

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the engine's loop. Raises EngineUnavailableError after `stop` and in a fork."""
        try:
            if os.getpid() != self._pid:
                raise EngineUnavailableError(
                    f"this LLM belongs to process {self._pid}, of which this is a fork; make an LLM where it is used"
                )
            with self._lock:
                if self._stopping:
                    raise EngineUnavailableError("this LLM was shut down; make a new one")
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise

    def result(self, future: concurrent.futures.Future[T]) -> T:
        """The result of `submit`. Raises EngineUnavailableError if the engine was stopped meanwhile."""
        while not concurrent.futures.wait([future], timeout=_SIGNAL_SECONDS).done:
            pass
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineUnavailableError("this LLM was shut down while it worked") from None

    def stop(self) -> None:
        """Stop the engine and end the thread. Waits for it, except in such a thread itself."""
        # A fork has a copy of this object, but neither the thread nor the workers.
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._stopping = True
            if not self.is_alive():
                self._loop.close()
                return
            asyncio.run_coroutine_threadsafe(self._stop_engine(), self._loop)
        # Finalizers may run in any thread. A loop that waits for itself, or for another that waits for it, never ends.
        if not isinstance(threading.current_thread(), EngineThread):
            self.join()

    def run(self) -> None:
        """The thread's work."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._cancel_the_rest())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _stop_engine(self) -> None:
        try:
            await self.engine.stop()
        finally:
            self._loop.stop()

    async def _cancel_the_rest(self) -> None:
        """Cancel all other tasks."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def next_item(items: queue.SimpleQueue[T]) -> T:
    """Wait for the next item that the engine's thread puts."""
    while True:
        try:
            return items.get(timeout=_SIGNAL_SECONDS)
        except queue.Empty:
            pass
