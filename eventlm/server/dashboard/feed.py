"""One frame a second for all who watch, made and encoded once. While nobody watches there is no task and no timer.

A watcher that is slower than the frames misses some: it gets the newest one when it asks for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
import structlog
from msgspec import Struct

from eventlm.errors import EventLMError
from eventlm.metrics.components import EngineMetrics
from eventlm.metrics.frame import Frame, frame
from eventlm.text.engine import Engine

INTERVAL_SECONDS = 1.0

_log = structlog.get_logger("eventlm.server")


class LiveFrame(Struct, frozen=True, kw_only=True):
    """An event of `/admin/look/live`.

    number: counts the frames; one is left out for a client that reads too slowly. num_rate_limited: requests that a
    key's limit refused in the frame's interval. is_recording: False also if the disk is full. num_events_behind: those
    that are not written yet.
    """

    number: int
    state: Literal["loading", "ready", "draining", "dead"]
    num_rate_limited: int
    is_recording: bool
    num_events_behind: int
    num_front_ends: int
    num_front_ends_up: int
    frame: Frame


def live_frame(number: int, before: EngineMetrics, after: EngineMetrics) -> LiveFrame:
    """The frame between two readings of an engine's metrics."""
    recorder = after.recorder
    return LiveFrame(
        number=number,
        state=after.state,
        num_rate_limited=sum(after.rate_limited.values()) - sum(before.rate_limited.values()),
        is_recording=recorder is not None and recorder.is_writing,
        num_events_behind=recorder.num_events_behind if recorder is not None else 0,
        num_front_ends=len(after.front_ends),
        num_front_ends_up=sum(each.is_up for each in after.front_ends),
        frame=frame(before.log, after.log, start_ns=before.now_ns, end_ns=after.now_ns),
    )


class FeedFailedError(EventLMError):
    """No frames can be made; the log has why."""

    def __init__(self) -> None:
        super().__init__("the dashboard's frames cannot be made; the server's log has why")


class Watcher:
    """One who watches. `next` is the next frame."""

    def __init__(self, feed: FrameFeed) -> None:
        self._feed = feed
        self._last = b""

    async def next(self) -> bytes | None:
        """The newest frame that it has not had, as a server-sent event; None at the end of the server.

        Raises what ended the feed, unless it has begun anew since.
        """
        feed = self._feed
        while feed.event in (b"", self._last) and feed.error is None and not feed.is_closed:
            await feed.changed.wait()
        if feed.is_closed:
            return None
        if feed.error is not None:
            raise feed.error
        self._last = feed.event
        return feed.event


class FrameFeed:
    """The frames of one engine. `event` is the newest, `number` its number; empty and 0 before the first.

    changed: set once at the next change of these, of `error` or of `is_closed`.
    """

    def __init__(self, engine: Engine, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.number = 0
        self.event = b""
        self.error: EventLMError | None = None
        self.is_closed = False
        self.changed = asyncio.Event()
        self.num_watchers = 0
        self._engine = engine
        self._interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """A watcher for as long as the context lasts; the last one to leave ends the work."""
        self.num_watchers += 1
        if self._task is None and not self.is_closed:
            self.number, self.event, self.error = 0, b"", None
            self._task = asyncio.create_task(self._run(), name="dashboard frames")
        try:
            yield Watcher(self)
        finally:
            self.num_watchers -= 1
            if not self.num_watchers:
                self._stop()

    def close(self) -> None:
        """End it for all who watch and will."""
        self.is_closed = True
        self._stop()
        self._tell()

    def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _tell(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def _run(self) -> None:
        try:
            before = await self._engine.read_metrics()
            # At once, so that the gauges are there; rates need a second.
            self._publish(before, before)
            while True:
                await asyncio.sleep(self._interval_seconds)
                after = await self._engine.read_metrics()
                self._publish(before, after)
                before = after
        except Exception as error:
            if not isinstance(error, EventLMError):
                _log.exception("the dashboard's frames cannot be made")
            self.error = error if isinstance(error, EventLMError) else FeedFailedError()
            self._task = None
            self._tell()

    def _publish(self, before: EngineMetrics, after: EngineMetrics) -> None:
        self.number += 1
        self.event = b"data: " + msgspec.json.encode(live_frame(self.number, before, after)) + b"\n\n"
        self._tell()
