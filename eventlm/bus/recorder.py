"""The recorder: what a drain has to say goes to the writer, and what must wait for that leaves behind it.

A `Recorder` writes at once, so a slow disk is waited for. A `ThreadedRecorder` writes in a thread of its own; nobody
waits for longer than the time it was given, then events are given up, and a `gap` will stand for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from eventlm.bus.log_writer import LogWriter
from eventlm.events.codec import chain

Effect = Callable[[], None]


class Recorder:
    """Writes what it is given before it returns.

    on_idle: called when nothing is being written and a segment may be started, at any time between two drains.
    """

    def __init__(self, writer: LogWriter) -> None:
        self.writer = writer
        self.on_idle: Effect = _nothing

    def write(self, bodies: list[bytes], then: Effect, *, tokens: Sequence[bytes] = ()) -> None:
        """Write the events of one drain, and call `then` once they are written or given up, in the order of the calls.

        tokens: the token log's lines of these events. Raises LogWriteError if not even the header can be written; then
        nothing is called.
        """
        self._append(bodies, tokens)
        self.writer.flush()
        then()

    def _append(self, bodies: list[bytes], tokens: Sequence[bytes]) -> None:
        if tokens:
            self.writer.append_tokens(list(tokens))
        for body in bodies:
            self.writer.append(body)

    @property
    def problem(self) -> str:
        """Why nothing is written at the moment, else empty."""
        return self.writer.problem

    @property
    def segment_due(self) -> bool:
        """Whether `start_segment` should be called."""
        return self.writer.segment_due

    @property
    def previous_h(self) -> str:
        """The hash of the line after which a segment would start now."""
        return self.writer.previous_h

    def start_segment(self, first_s: int, lines: Iterator[bytes], then: Effect) -> None:
        """As LogWriter.start_segment; `then` as in `write`."""
        self.writer.start_segment(first_s, lines)
        then()

    def settle(self) -> None:
        """Wait, for a bounded time, until nothing is waiting to be written."""

    def close(self) -> None:
        """Settle, and close the log."""
        self.writer.close()


class _Entry(NamedTuple):
    """Lines, those of the token log, and what waits for them. first_s: of the segment that they begin; None if they
    go on with the last one. has_gap: that segment begins with a gap. since: seconds of the loop's clock.
    """

    bodies: list[bytes]
    then: Effect
    since: float
    first_s: int | None = None
    has_gap: bool = False
    tokens: Sequence[bytes] = ()


class ThreadedRecorder(Recorder):
    """Writes in a thread, all that waits in one go; everything but the writes themselves runs in the loop.

    The writer belongs to the thread while something is being written, else to the loop. Once the oldest drain that is
    not written is `lag_seconds` old, or more than `lag_bytes` wait for a write to return, whatever waits leaves. What
    was not yet being written is lost, and so is all that comes before that write has returned.

    guard: calls what it is given, in the loop, and knows what to do if that raises. on_problem: told when the first
    event is given up, in the loop. Raises LogWriteError from the first `write`, which is done at once.
    """

    def __init__(
        self,
        writer: LogWriter,
        *,
        loop: asyncio.AbstractEventLoop,
        lag_seconds: float,
        lag_bytes: int,
        on_problem: Callable[[str], None],
        guard: Callable[[Effect], None],
    ) -> None:
        super().__init__(writer)
        self._loop = loop
        self._lag_seconds = lag_seconds
        self._lag_bytes = lag_bytes
        self._on_problem = on_problem
        self._guard = guard
        self._waiting: list[_Entry] = []
        self._num_waiting_bytes = 0
        self._in_flight: list[_Entry] = []
        #: The write in flight has returned, even if the loop does not know it yet.
        self._has_returned = threading.Event()
        #: Why nothing waits any more for the write in flight.
        self._given_up = ""
        #: Events have been dropped since.
        self._is_lossy = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._batches: queue.SimpleQueue[list[_Entry] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_batches, name="eventlm-recorder", daemon=True)
        self._thread.start()

    def write(self, bodies: list[bytes], then: Effect, *, tokens: Sequence[bytes] = ()) -> None:
        """As Recorder.write, but it returns at once."""
        if not self.writer.num_events:
            super().write(bodies, then, tokens=tokens)
        elif self.problem:
            self._is_lossy = True
            then()
        else:
            self._waiting.append(_Entry(bodies, then, self._loop.time(), tokens=tokens))
            self._num_waiting_bytes += sum(map(len, bodies)) + sum(map(len, tokens))
            self._send()
            if self._num_waiting_bytes > self._lag_bytes:
                self._give_up(f"more than {self._lag_bytes} bytes waited for the disk")

    @property
    def problem(self) -> str:
        """Why nothing is written at the moment, else empty. While a write is in flight, it may yet succeed."""
        return self._given_up or ("" if self._in_flight else self.writer.problem)

    @property
    def segment_due(self) -> bool:
        """Whether `start_segment` should be called: never while a write is in flight."""
        return not self._in_flight and self.writer.segment_due

    @property
    def previous_h(self) -> str:
        """The hash of the last line that waits or is written; not while a write is in flight."""
        h = self.writer.previous_h
        for entry in self._waiting:
            for body in entry.bodies:
                h = chain(h, body)
        return h

    def start_segment(self, first_s: int, lines: Iterator[bytes], then: Effect) -> None:
        """As Recorder.start_segment, but all lines are asked for at once; none while a write hangs."""
        if self._given_up:
            then()
            return
        has_gap = bool(self.writer.problem)
        self._waiting.append(_Entry(list(lines), then, self._loop.time(), first_s, has_gap))
        self._send()

    def settle(self) -> None:
        """Wait, as long as a write may take, until all is written; give up what is not."""
        until = time.monotonic() + self._lag_seconds
        while self._in_flight:
            if not self._has_returned.wait(max(until - time.monotonic(), 0)):
                self._give_up_late()
                return
            self._go_on(self._in_flight)

    def close(self) -> None:
        """Settle, and have the thread close the log; if it hangs in a write, once that returns."""
        if self._is_closed:
            return
        self.settle()
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._batches.put(None)
        if not self._in_flight:
            self._thread.join(self._lag_seconds)

    def _send(self) -> None:
        """Give all that waits to the thread, if that has nothing to do."""
        if self._in_flight or not self._waiting:
            return
        self._in_flight, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        self._has_returned.clear()
        self._batches.put(self._in_flight)
        if self._timer is None:
            self._arm_timer()

    def _arm_timer(self) -> None:
        due = self._in_flight[0].since + self._lag_seconds
        self._timer = self._loop.call_at(due, self._guard, self._check_lag)

    def _check_lag(self) -> None:
        """One timer at a time, which is not moved with each write."""
        self._timer = None
        if not self._in_flight or self._given_up:
            return
        if self._loop.time() < self._in_flight[0].since + self._lag_seconds:
            self._arm_timer()
        elif not self._has_returned.is_set():
            self._give_up_late()

    def _give_up_late(self) -> None:
        if not self._given_up:
            self._give_up(f"a write took longer than {round(1000 * self._lag_seconds)} ms")

    def _give_up(self, reason: str) -> None:
        """Let everything leave, in its order."""
        self._given_up = reason
        self._on_problem(f"the trace {self.writer.path} lags: {reason}; events are lost until the disk answers")
        self._is_lossy = False
        self._release(self._in_flight)
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        dropped, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        self._is_lossy = self._is_lossy or bool(dropped)
        self._release(dropped)

    def _release(self, entries: list[_Entry]) -> None:
        for entry in entries:
            entry.then()

    def _go_on(self, batch: list[_Entry]) -> None:
        """In the loop: this batch is written, or `writer.problem` says why not all of it."""
        if batch is not self._in_flight or self._is_closed:
            return
        self._in_flight = []
        given_up, self._given_up = self._given_up, ""
        if not given_up:
            self._release(batch)
        elif self._is_lossy:
            self.writer.give_up(given_up)
        elif not self.writer.problem:
            self._on_problem(f"the trace {self.writer.path} is written again; no event was lost")
        if self.writer.problem:
            self._drop_waiting()
        self.on_idle()
        self._send()

    def _write_batches(self) -> None:
        """The thread."""
        while (batch := self._batches.get()) is not None:
            self._write_batch(batch)
            self._has_returned.set()
            with contextlib.suppress(RuntimeError):
                # The loop may be closed by now.
                self._loop.call_soon_threadsafe(self._guard, partial(self._go_on, batch))
        self.writer.close()

    def _write_batch(self, batch: list[_Entry]) -> None:
        for entry in batch:
            if entry.first_s is None:
                self._append(entry.bodies, entry.tokens)
                continue
            self.writer.flush()
            # Where a write has failed meanwhile, the segment says nothing of the gap.
            if entry.has_gap == bool(self.writer.problem):
                self.writer.start_segment(entry.first_s, iter(entry.bodies), is_stamped=True)
        self.writer.flush()


def _nothing() -> None:
    """What is to be done where nobody wants to know."""
