"""The store on its thread: order, waits, time, a disk that fails."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from msgspec import structs

from eventlm.config import ServerConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.object_store import store as store_module
from eventlm.engine.object_store.actions import (
    ChangeObject,
    ObjectHeldError,
    Objects,
    ObjectStoreError,
    PutObject,
    UnknownObjectError,
)
from eventlm.engine.object_store.store import ObjectStore
from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import UsageError
from eventlm.system.system import System, real_system
from eventlm.system.threads import SystemThreads, TaskThread
from tests.engine.engines import fake_setup
from tests.processes import PATIENCE_SECONDS


class HandClock:
    """Unix time that is set by hand."""

    def __init__(self) -> None:
        self.now_ns = 10**18

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        return self.now_ns

    def unix_s(self) -> int:
        return self.now_ns // 10**9


@asynccontextmanager
async def opened(system: System | None = None, **settings: Any) -> AsyncIterator[tuple[ObjectStore, Objects]]:
    store = ObjectStore(system or real_system(), ServerConfig(**settings))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await store.open()
            yield store, Objects(store.carry_out)
    finally:
        await store.close()


async def test_nothing_is_opened_before_something_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Threads(SystemThreads):
        def start(self, name: str) -> TaskThread:
            started.append(name)
            return super().start(name)

    async with opened(real_system()._replace(threads=Threads())) as (store, objects):
        store.end_holds(1)
        assert started == []
        await objects.put("thing", "a", "me", b"1")
        await objects.put("thing", "b", "me", b"2")
        assert started == ["eventlm-object-store"]
        assert (await objects.get("thing", "a", "me")).data == b"1"


async def test_calls_at_once_are_done_in_their_order() -> None:
    async with opened() as (_, objects):
        await asyncio.gather(*(objects.put("thing", "a", "me", b"%d" % number) for number in range(50)))
        assert (await objects.get("thing", "a", "me")).data == b"49"


async def test_an_engine_does_not_start_with_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    setup = fake_setup()
    server = ServerConfig(response_store=str(tmp_path / "none" / "store"))
    engine = InferenceEngine(structs.replace(setup, config=structs.replace(setup.config, server=server)), real_system())
    with pytest.raises(UsageError, match="there is no folder"):
        await engine.start()
    assert (engine.state, engine.worker_pids) == ("dead", [0])
    await engine.stop()


async def test_an_engine_keeps_objects_until_it_stops(tmp_path: Path) -> None:
    setup = fake_setup()
    server = ServerConfig(response_store=str(tmp_path / "store"))
    setup = structs.replace(setup, config=structs.replace(setup.config, server=server))
    for number in range(2):
        engine = InferenceEngine(setup, real_system())
        await engine.start()
        await engine.objects.put("thing", str(number), "me", b"", hold=True)
        engine.lose_front_end(0)
        assert not (await engine.objects.get("thing", "0", "me", wait_seconds=PATIENCE_SECONDS)).is_held
        await engine.stop()
        with pytest.raises(EngineUnavailableError):
            await engine.objects.get("thing", "0", "me")


async def test_a_file_is_checked_when_the_store_is_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        async with opened(response_store=str(tmp_path / "none" / "store")):
            pass


async def test_a_waiting_reader_gets_an_object_as_soon_as_it_is_free() -> None:
    async with opened() as (_, objects):
        await objects.put("thing", "a", "me", b"in progress", hold=True)
        waiting = asyncio.ensure_future(objects.get("thing", "a", "me", wait_seconds=PATIENCE_SECONDS))
        await objects.change("thing", "a", "me", b"half")
        assert (await objects.get("thing", "a", "me")).is_held
        assert not waiting.done()
        await objects.change("thing", "a", "me", b"done", hold=False)
        found = await waiting
        assert (found.data, found.is_held) == (b"done", False)


async def test_a_waiting_reader_gets_what_is_there_when_its_time_is_over() -> None:
    async with opened() as (store, objects):
        await objects.put("thing", "a", "me", b"in progress", hold=True)
        found = await objects.get("thing", "a", "me", wait_seconds=0.01)
        assert (found.data, found.is_held) == (b"in progress", True)
        assert not store._waiting


async def test_a_waiting_reader_learns_that_it_is_deleted_or_its_holder_gone() -> None:
    async with opened() as (store, objects):
        await objects.put("thing", "a", "me", b"", hold=True)
        await objects.put("thing", "b", "me", b"left", hold=True)
        waiting = [
            asyncio.ensure_future(objects.get("thing", id, "me", wait_seconds=PATIENCE_SECONDS)) for id in ("a", "b")
        ]
        await asyncio.sleep(0)
        await objects.delete("thing", "a", "me")
        with pytest.raises(UnknownObjectError):
            await waiting[0]
        store.end_holds(0)
        assert (await waiting[1]).data == b"left"
        assert not store._waiting


async def test_a_hold_that_nobody_waits_for_ends() -> None:
    async with opened() as (_, objects):
        await objects.put("thing", "a", "me", b"")
        taking = asyncio.ensure_future(objects.change("thing", "a", "me", hold=True))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert not (await objects.get("thing", "a", "me", wait_seconds=PATIENCE_SECONDS)).is_held
        await objects.change("thing", "a", "me", hold=True)


async def test_one_at_a_time_holds_an_object() -> None:
    async with opened() as (store, objects):

        async def is_held(id: str) -> bool:
            return (await objects.get("thing", id, "me")).is_held

        await objects.put("thing", "a", "me", b"")
        assert not await is_held("a")
        await objects.change("thing", "a", "me", hold=True)
        for data in (None, b"of the second"):
            with pytest.raises(ObjectHeldError):
                await objects.change("thing", "a", "me", data, hold=True)
        await objects.change("thing", "a", "me", b"1")
        assert await is_held("a")
        await objects.change("thing", "a", "me", b"2", hold=False)
        assert not await is_held("a")
        # Holds of a front end end with it.
        await store.carry_out(ChangeObject(kind="thing", id="a", owner="me", hold=True, holder=2))
        await store.carry_out(PutObject(kind="thing", id="b", owner="me", data=b"", hold=True, holder=2))
        await objects.put("thing", "c", "me", b"", hold=True)
        store.end_holds(2)
        assert [id for id in "abc" if await is_held(id)] == ["c"]
        await objects.put("thing", "c", "me", b"")
        assert not await is_held("c")


async def test_what_does_not_exist_cannot_be_held() -> None:
    async with opened() as (store, objects):
        with pytest.raises(UnknownObjectError):
            await objects.change("thing", "a", "me", hold=True)
        await objects.change("thing", "a", "me", hold=False)
        assert not store._holders


async def test_expired_objects_are_deleted_without_a_further_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    system = real_system()._replace(clock=clock)
    monkeypatch.setattr(store_module, "EXPIRE_SECONDS", 0.0)
    async with opened(system, response_seconds=1) as (store, objects):
        await objects.put("thing", "a", "me", b"1")
        clock.now_ns += 10**9
        with pytest.raises(UnknownObjectError):
            await objects.get("thing", "a", "me")
        # A second on the loop's clock, which is a real one.
        while await store._call(lambda database: database.totals()) != (0, 0):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_full_disk_is_one_error_and_the_store_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "store"
    async with opened(response_store=str(path)) as (store, objects):
        await objects.put("thing", "a", "me", b"kept", hold=True)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # No file can grow beyond it.
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
        try:
            with structlog.testing.capture_logs() as logs, pytest.raises(ObjectStoreError) as failure:
                await objects.put("thing", "b", "me", b"x" * 100_000, hold=True)
            # That needs no room.
            await objects.change("thing", "a", "me", hold=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert str(failure.value).startswith("the server's store of responses cannot be used: ")
        assert str(path) not in str(failure.value)
        assert [(each["event"], each["store"]) for each in logs] == [
            ("the store of responses cannot be used", str(path))
        ]
        found = await objects.get("thing", "a", "me")
        assert (found.data, found.is_held, store._holders) == (b"kept", False, {})
        with pytest.raises(UnknownObjectError):
            await objects.get("thing", "b", "me")
        await objects.put("thing", "b", "me", b"x" * 100_000)


async def test_a_hold_that_came_too_late_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (store, objects):
        await objects.put("thing", "a", "me", b"")
        is_slow = threading.Event()
        blocking = asyncio.ensure_future(store._call(lambda database: is_slow.wait(PATIENCE_SECONDS)))
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "MAX_ACTION_SECONDS", 0.01)
            with pytest.raises(ObjectStoreError, match="no answer"):
                await objects.change("thing", "a", "me", b"late", hold=True)
        is_slow.set()
        await blocking
        found = await objects.get("thing", "a", "me")
        assert (found.data, found.is_held) == (b"late", False)


async def test_nobody_waits_for_ever_for_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    class StuckThread:
        def run(self, action: Callable[[], None]) -> None:
            pass

        def wait(self, timeout_seconds: float) -> bool:
            return False

        def stop(self) -> None:
            pass

    class StuckThreads:
        def start(self, name: str) -> TaskThread:
            return StuckThread()

    monkeypatch.setattr(store_module, "MAX_ACTION_SECONDS", 0.01)
    async with opened(real_system()._replace(threads=StuckThreads())) as (_, objects):
        with pytest.raises(ObjectStoreError, match="no answer for 0 s"):
            await objects.put("thing", "a", "me", b"")


async def test_a_closed_store_does_nothing_more() -> None:
    async with opened() as (store, objects):
        await objects.put("thing", "a", "me", b"")
        await store.close()
        await store.close()
        store.end_holds(0)
        with pytest.raises(EngineUnavailableError, match="the engine is not running"):
            await objects.get("thing", "a", "me")
