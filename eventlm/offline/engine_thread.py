"""An engine and its event loop in a thread of their own, so that the caller may have a loop of its own or none."""

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

#: How late a signal may be handled while the caller waits. The kernel may deliver it to another thread, and it does not
#: end an untimed wait of this one then.
_SIGNAL_SECONDS = 0.5


class EngineThread(threading.Thread):
    """Runs an engine from `start_engine` to `stop`, which must be called once. A daemon: it never holds up the exit."""

    def __init__(self, engine: InferenceEngine) -> None:
        super().__init__(name="eventlm", daemon=True)
        self.engine = engine
        # As in the server; and it can start processes under whatever policy the program has set.
        self._loop = uvloop.new_event_loop()
        self._pid = os.getpid()
        #: Whatever is submitted is known to the loop before it hears of the end.
        self._lock = threading.Lock()
        self._stopping = False

    def start_engine(self) -> None:
        """Start the thread, and the engine in it. Raises what keeps the engine from starting."""
        self.start()
        self.result(self.submit(self.engine.start()))

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine beside the engine. Raises EngineUnavailableError where there is no engine."""
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
        # Garbage may be collected anywhere: a loop that waited for its own end, or for another that waits for it, would
        # wait for ever.
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
        """Whoever still waits hears of the end."""
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
