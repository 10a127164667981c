"""The object store in the engine's process: a database in a thread of its own, which the loop never waits for."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import structlog
from msgspec import structs

from eventlm.config import ServerConfig
from eventlm.engine.object_store.actions import (
    ChangeObject,
    DeleteObject,
    GetObject,
    Key,
    ObjectAction,
    ObjectHeldError,
    ObjectStoreError,
    PutObject,
    StoredObject,
    key_of,
)
from eventlm.engine.object_store.database import Bounds, Database
from eventlm.engine.request import EngineUnavailableError
from eventlm.system.system import System
from eventlm.system.threads import TaskThread
from eventlm.types import NANOSECONDS_PER_SECOND

T = TypeVar("T")

#: A disk that takes longer is broken.
MAX_ACTION_SECONDS = 30.0
#: Expired objects are looked for at most and at least this often.
EXPIRE_SECONDS, MAX_EXPIRE_SECONDS = 1.0, 3600.0

log = structlog.get_logger("eventlm.engine")


class _Holder:
    """Who holds an object, or is about to. front_end: its number, 0 for this process."""

    def __init__(self, front_end: int) -> None:
        self.front_end = front_end


class ObjectStore:
    """Carries out `ObjectAction`s in order. Opens its database at the first one, or by `open`."""

    def __init__(self, system: System, config: ServerConfig) -> None:
        self._system = system
        self._path = config.response_store
        self._bounds = Bounds.of(config)
        self._thread: TaskThread | None = None
        #: Used by the thread only.
        self._database: Database | None = None
        self._is_closed = False
        #: Who holds what. The database reads it.
        self._holders: dict[Key, _Holder] = {}
        #: Those that wait until an object is no longer held.
        self._waiting: defaultdict[Key, set[asyncio.Event]] = defaultdict(set)
        self._expiry: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Open a file now, so that one that cannot be used stops a start. Raises UsageError."""
        if self._path:
            self._expire_later(await self._call(lambda database: database.expire()))

    async def carry_out(self, action: ObjectAction) -> Any:
        """Do an action. Raises what `Objects` says."""
        if isinstance(action, GetObject):
            return await (self._get_free(action) if action.wait_seconds else self._get(action))
        if not isinstance(action, PutObject | ChangeObject):
            result = await self._call(lambda database: database.carry_out(action))
            if isinstance(action, DeleteObject):
                self._wake(key_of(action))
            return result
        await self._write(action)
        if self._expiry is None:
            self._expire_later(self._bounds.keep_ns)
        return None

    def end_holds(self, front_end: int) -> None:
        """A front end is gone: end its holds."""
        for key in [key for key, holder in self._holders.items() if holder.front_end == front_end]:
            self._end_hold(key)

    async def close(self) -> None:
        """Close the database after what was asked for. Nothing can be done from then on."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        if self._thread is not None:
            with contextlib.suppress(ObjectStoreError):
                await self._in_thread(self._thread, self._close)
            self._thread.stop()

    async def _write(self, action: PutObject | ChangeObject) -> None:
        """An object is held from before it is written, and no longer if that fails or takes too long."""
        key, holder = key_of(action), None
        if isinstance(action, ChangeObject) and action.hold is False and not action.writes:
            self._end_hold(key)
            return
        if action.hold:
            if isinstance(action, ChangeObject) and key in self._holders:
                raise ObjectHeldError(f"another request works on '{action.id}'")
            holder = self._holders[key] = _Holder(action.holder)
        try:
            await self._call(lambda database: database.carry_out(action))
        except BaseException:
            if holder is not None and self._holders.get(key) is holder:
                self._end_hold(key)
            raise
        if action.hold is False:
            self._end_hold(key)
        else:
            self._wake(key)

    def _end_hold(self, key: Key) -> None:
        self._holders.pop(key, None)
        self._wake(key)

    def _wake(self, key: Key) -> None:
        for event in self._waiting.get(key, ()):
            event.set()

    async def _get(self, action: GetObject) -> StoredObject:
        # A holder writes before it ends its hold, so an object that was not held when it was read is complete.
        is_held = key_of(action) in self._holders
        found: StoredObject = await self._call(lambda database: database.carry_out(action))
        return structs.replace(found, is_held=is_held)

    async def _get_free(self, action: GetObject) -> StoredObject:
        """Get an object once it is no longer held, or as it is when the time is over."""
        key = key_of(action)
        is_changed = asyncio.Event()
        self._waiting[key].add(is_changed)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(action.wait_seconds):
                    while (await self._get(action)).is_held:
                        await is_changed.wait()
                        is_changed.clear()
        finally:
            self._waiting[key].discard(is_changed)
            if not self._waiting[key]:
                del self._waiting[key]
        return await self._get(action)

    def _expire_later(self, delay_ns: int) -> None:
        delay_seconds = min(max(delay_ns / NANOSECONDS_PER_SECOND, EXPIRE_SECONDS), MAX_EXPIRE_SECONDS)
        self._expiry = asyncio.get_running_loop().call_later(delay_seconds, self._expire)

    def _expire(self) -> None:
        task = asyncio.ensure_future(self._call(lambda database: database.expire()))

        def expired(task: asyncio.Future[int]) -> None:
            if not self._is_closed:
                failed = task.cancelled() or task.exception() is not None
                self._expire_later(self._bounds.keep_ns if failed else task.result())

        task.add_done_callback(expired)

    async def _call(self, action: Callable[[Database], T]) -> T:
        if self._is_closed:
            raise EngineUnavailableError("the engine is not running")
        if self._thread is None:
            self._thread = self._system.threads.start("eventlm-object-store")
        return await self._in_thread(self._thread, partial(self._do, action))

    def _do(self, action: Callable[[Database], T]) -> T:
        if self._database is None:
            self._database = Database(self._path, self._bounds, self._system.clock.unix_ns, self._holders)
        return action(self._database)

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()

    async def _in_thread(self, thread: TaskThread, action: Callable[[], T]) -> T:
        """Run an action in the thread. Raises what it raises, and ObjectStoreError for what SQLite raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = action()
            except Exception as failure:
                error = failure
            # The loop has ended if nobody waits for it any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        thread.run(run)
        try:
            async with asyncio.timeout(MAX_ACTION_SECONDS):
                return await done
        except TimeoutError as error:
            raise self._broken(f"no answer for {MAX_ACTION_SECONDS:.0f} s") from error
        except sqlite3.Error as error:
            raise self._broken(str(error)) from error

    def _broken(self, reason: str) -> ObjectStoreError:
        # Clients need not know where it is.
        log.error("the store of responses cannot be used", store=self._path or "memory", error=reason)
        return ObjectStoreError(f"the server's store of responses cannot be used: {reason}")
