"""Ends the wait for a server that has fallen silent."""

from __future__ import annotations

import asyncio
from typing import Self

import aiohttp


class Silence:
    """Lets reads of `content` fail with TimeoutError once there was no sign of life for `seconds`. Use it in `with`.

    Its timer is moved only when it goes off: one for each read would cost as much as the rest of the read.
    num_read: bytes taken from `content`; keep it up to date. deadline: of the first sign of life, in the loop's time.
    """

    def __init__(self, content: aiohttp.StreamReader, deadline: float, seconds: float) -> None:
        self.num_read = 0
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._content = content
        self._deadline = deadline
        self._timer = self._loop.call_at(deadline, self._check)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def extend(self, seconds: float) -> None:
        """There was a sign of life; wait so long for the next."""
        self._deadline = self._loop.time() + seconds
        if seconds != self.seconds:
            self.seconds = seconds
            self._timer.cancel()
            self._timer = self._loop.call_at(self._deadline, self._check)

    def _check(self) -> None:
        if self._content.total_bytes > self.num_read:
            # What came is still unread: this process was busy.
            self._deadline = self._loop.time() + self.seconds
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check)
        else:
            self._content.set_exception(TimeoutError())
