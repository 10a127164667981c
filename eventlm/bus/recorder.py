"""The recorder: writes the events of each drain, and releases the effects that wait for them.

A `Recorder` writes at once, so everything waits for a slow disk. A `ThreadedRecorder` writes in a thread of its own,
which may sync, too. Effects wait there as long as it takes, or for a limited time; then events are given up, and a
`gap` will stand for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from eventlm.bus.log_writer import LogWriter
from eventlm.events.codec import chain
from eventlm.system.system import System

Effect = Callable[[], None]


class Recorder:
    """Writes what it is given before it returns.

    on_idle: called when nothing is being written and a segment may be started, at any time between two drains.
    """

    def __init__(self, writer: LogWriter) -> None:
        self.writer = writer
        self.on_idle: Effect = _nothing

    def write(
        self, bodies: list[bytes], then: Effect, *, tokens: Sequence[bytes] = (), records: Sequence[bytes] = ()
    ) -> None:
        """Write the events of one drain, and call `then` once they are written or given up, in the order of the calls.

        tokens: the token log's lines of these events. records: frames of the spool. Raises LogWriteError if not even
        the header can be written; then nothing is called.
        """
        self._append(bodies, tokens, records)
        self.writer.flush()
        then()

    def _append(self, bodies: list[bytes], tokens: Sequence[bytes], records: Sequence[bytes]) -> None:
        if tokens:
            self.writer.append_tokens(list(tokens))
        if records:
            self.writer.append_records(records)
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
    """Lines, those of the token log, frames of the spool, and the effect that waits for them. first_s: of the segment
    that they begin; None if they continue the last one. has_gap: that segment begins with a gap. since: seconds of the
    loop's clock. syncs: the log is to be synced after this.
    """

    bodies: list[bytes]
    then: Effect
    since: float
    first_s: int | None = None
    has_gap: bool = False
    tokens: Sequence[bytes] = ()
    records: Sequence[bytes] = ()
    syncs: bool = False


class ThreadedRecorder(Recorder):
    """Writes in a thread, all waiting drains at once. Only writes and syncs run there, everything else in the loop.

    The thread uses the writer while a write is in flight, the loop at other times. Once the oldest drain that is not
    written is `lag_seconds` old, or more than `lag_bytes` wait for a write to return, all effects are released. Drains
    that were not being written are lost, and so are those that come before that write has returned. lag_seconds None:
    nothing is ever given up, and while more than `lag_bytes` wait, the loop waits, too.

    sync_seconds: 0: each write is synced before its effects are released, and what comes meanwhile goes into the next.
    Else what is written is synced so much later, for which only those wait that come while it is synced. None: nothing
    is synced. A sync is a write that may take too long, as any other.

    guard: calls an effect, in the loop, and handles what it raises. on_problem: called in the loop when the first event
    is given up. The first `write` is done at once, and raises LogWriteError.
    """

    def __init__(
        self,
        system: System,
        writer: LogWriter,
        *,
        loop: asyncio.AbstractEventLoop,
        lag_seconds: float | None,
        lag_bytes: int,
        sync_seconds: float | None = None,
        on_problem: Callable[[str], None],
        guard: Callable[[Effect], None],
    ) -> None:
        super().__init__(writer)
        self._clock = system.clock
        self._loop = loop
        self._lag_seconds = lag_seconds
        self._lag_bytes = lag_bytes
        self._sync_seconds = sync_seconds
        self._on_problem = on_problem
        self._guard = guard
        self._waiting: list[_Entry] = []
        self._num_waiting_bytes = 0
        self._in_flight: list[_Entry] = []
        #: The write in flight has returned, even if the loop has not noticed yet. Set by the thread.
        self._has_returned = False
        #: Why effects no longer wait for the write in flight.
        self._given_up = ""
        #: Events have been dropped since.
        self._is_lossy = False
        self._timer: asyncio.TimerHandle | None = None
        self._sync_timer: asyncio.TimerHandle | None = None
        self._is_sync_due = False
        self._is_closed = False
        self._thread = system.threads.start("eventlm-recorder")

    def write(
        self, bodies: list[bytes], then: Effect, *, tokens: Sequence[bytes] = (), records: Sequence[bytes] = ()
    ) -> None:
        """As Recorder.write, but it returns at once."""
        if not self.writer.num_events:
            super().write(bodies, then, tokens=tokens, records=records)
        elif self.problem:
            self._is_lossy = True
            then()
        else:
            self._waiting.append(_Entry(bodies, then, self._loop.time(), tokens=tokens, records=records))
            self._num_waiting_bytes += sum(map(len, (*bodies, *tokens, *records)))
            self._send()
            if self._num_waiting_bytes > self._lag_bytes:
                if self._lag_seconds is None:
                    self.settle()
                else:
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
        """The hash of the last line, waiting or written; not while a write is in flight."""
        h = self.writer.previous_h
        for entry in self._waiting:
            for body in entry.bodies:
                h = chain(h, body)
        return h

    def start_segment(self, first_s: int, lines: Iterator[bytes], then: Effect) -> None:
        """As Recorder.start_segment, but takes all lines at once; none while a write hangs."""
        if self._given_up:
            then()
            return
        has_gap = bool(self.writer.problem)
        self._waiting.append(_Entry(list(lines), then, self._loop.time(), first_s, has_gap))
        self._send()

    def settle(self) -> None:
        """Wait, as long as a write may take, until all is written; give up what is not."""
        began_ns = self._clock.monotonic_ns()
        self._send()
        while self._in_flight:
            left_seconds = self._lag_seconds
            if left_seconds is not None:
                left_seconds = max(left_seconds - (self._clock.monotonic_ns() - began_ns) / 1e9, 0)
            if not self._has_returned and not self._thread.wait(left_seconds):
                self._give_up_late()
                return
            self._go_on(self._in_flight)

    def close(self) -> None:
        """Settle, and let the thread close the log; if a write hangs, after that has returned."""
        if self._is_closed:
            return
        self.settle()
        self._is_closed = True
        for timer in (self._timer, self._sync_timer):
            if timer is not None:
                timer.cancel()
        self._thread.run(self.writer.close)
        if not self._in_flight:
            self._thread.wait(self._lag_seconds)
        self._thread.stop()

    def _send(self) -> None:
        """Give all waiting drains to the thread if it is idle, or let it sync if that is due."""
        if self._in_flight:
            return
        if self._is_sync_due:
            self._is_sync_due = False
            self._in_flight = [_Entry([], _nothing, self._loop.time(), syncs=True)]
        elif self._waiting:
            self._in_flight, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
            if self._sync_seconds and self._sync_timer is None:
                due = self._loop.time() + self._sync_seconds
                self._sync_timer = self._loop.call_at(due, self._guard, self._start_sync)
        else:
            return
        self._has_returned = False
        self._thread.run(partial(self._finish_batch, self._in_flight))
        if self._timer is None:
            self._arm_timer()

    def _start_sync(self) -> None:
        self._sync_timer, self._is_sync_due = None, True
        self._send()

    def _arm_timer(self) -> None:
        if self._lag_seconds is not None:
            due = self._in_flight[0].since + self._lag_seconds
            self._timer = self._loop.call_at(due, self._guard, self._check_lag)

    def _check_lag(self) -> None:
        """There is one timer at a time, and writes do not move it."""
        self._timer = None
        if self._lag_seconds is None or not self._in_flight or self._given_up:
            return
        if self._loop.time() < self._in_flight[0].since + self._lag_seconds:
            self._arm_timer()
        elif not self._has_returned:
            self._give_up_late()

    def _give_up_late(self) -> None:
        if not self._given_up and self._lag_seconds is not None:
            self._give_up(f"a write took longer than {round(1000 * self._lag_seconds)} ms")

    def _give_up(self, reason: str) -> None:
        """Release all effects in order."""
        self._given_up = reason
        self._tell_lag(reason)
        self._is_lossy = False
        self._release(self._in_flight)
        self._drop_waiting()

    def _tell_lag(self, reason: str) -> None:
        self._on_problem(f"the trace {self.writer.path} lags: {reason}; events are lost until the disk answers")

    def _drop_waiting(self) -> None:
        dropped, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        self._is_lossy = self._is_lossy or bool(dropped)
        self._release(dropped)

    def _release(self, entries: list[_Entry]) -> None:
        for entry in entries:
            entry.then()

    def _go_on(self, batch: list[_Entry]) -> None:
        """In the loop: this batch is written, or `writer.problem` is why a part of it is not."""
        if batch is not self._in_flight or self._is_closed:
            return
        self._in_flight = []
        given_up, self._given_up = self._given_up, ""
        if not given_up:
            self._release(batch)
        elif self._is_lossy:
            if not self.writer.problem and any(entry.has_gap for entry in batch):
                # The writer has told that it writes again: what was lost meanwhile is another gap.
                self._tell_lag(given_up)
            self.writer.give_up(given_up)
        elif not self.writer.problem:
            self._on_problem(f"the trace {self.writer.path} is written again; no event was lost")
        if self.writer.problem:
            self._drop_waiting()
        self.on_idle()
        self._send()

    def _finish_batch(self, batch: list[_Entry]) -> None:
        """In the thread."""
        self._write_batch(batch)
        self._has_returned = True
        with contextlib.suppress(RuntimeError):
            # The loop may be closed by now.
            self._loop.call_soon_threadsafe(self._guard, partial(self._go_on, batch))

    def _write_batch(self, batch: list[_Entry]) -> None:
        for entry in batch:
            if entry.first_s is None:
                self._append(entry.bodies, entry.tokens, entry.records)
                continue
            self.writer.flush()
            # If a write has failed since, the segment does not mention the gap.
            if entry.has_gap == bool(self.writer.problem):
                self.writer.start_segment(entry.first_s, iter(entry.bodies), is_stamped=True)
        self.writer.flush()
        if self._sync_seconds == 0 or batch[-1].syncs:
            self.writer.sync()


def _nothing() -> None:
    """The effect where none is wanted."""
