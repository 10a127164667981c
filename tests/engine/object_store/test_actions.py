"""Kept objects as front ends see them: over their connections, and two at once."""

from __future__ import annotations

import asyncio

import pytest

from eventlm.engine.object_store import actions
from eventlm.engine.object_store.actions import (
    DuplicateItemError,
    ItemPage,
    ObjectHeldError,
    ObjectTooLargeError,
    StoredObject,
    UnknownObjectError,
)
from eventlm.engine.request import EngineUnavailableError
from tests.engine.object_store.databases import items
from tests.server.remote_pair import Pair, assert_tidy, connected, until


async def test_everything_can_be_done_from_a_front_end() -> None:
    async with connected() as pair:
        objects = pair.engine.objects
        await objects.put("thing", "a", "me", b"\0\xff", items("1"))
        await objects.change("thing", "a", "me", items=items("2", "3"))
        assert await objects.get("thing", "a", "me") == StoredObject(b"\0\xff", is_held=False)
        assert await pair.double.objects.get("thing", "a", "me") == StoredObject(b"\0\xff", is_held=False)
        assert await objects.list_items("thing", "a", "me", limit=2) == ItemPage(items("1", "2"), has_more=True)
        assert await objects.list_items("thing", "a", "me", limit=2, after="2", is_descending=True) == ItemPage(
            items("1"), has_more=False
        )
        assert await objects.get_item("thing", "a", "me", "3") == b"3"
        assert await objects.find_item("me", "3") == b"3"
        assert await objects.delete_item("thing", "a", "me", "3")
        assert not await objects.delete_item("thing", "a", "me", "3")
        assert not await objects.delete("thing", "a", "you")
        assert await objects.delete("thing", "a", "me")
        assert_tidy(pair)


async def test_errors_come_as_they_were_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as pair:
        objects = pair.engine.objects
        await objects.put("thing", "a", "me", b"", items("1"), hold=True)
        for call, error in [
            (objects.get("thing", "b", "me"), UnknownObjectError),
            (objects.get("thing", "a", "you"), UnknownObjectError),
            (objects.get_item("thing", "a", "me", "2"), UnknownObjectError),
            (objects.change("thing", "a", "me", hold=True), ObjectHeldError),
            (objects.change("thing", "a", "me", items=items("1")), DuplicateItemError),
            (objects.put("thing", "b", "me", b"x" * (actions.MAX_OBJECT_BYTES + 1)), ObjectTooLargeError),
        ]:
            with pytest.raises(error):
                await call
        assert_tidy(pair)


async def test_a_front_end_that_is_lost_holds_nothing() -> None:
    async with connected() as pair:
        other = await Pair(pair.double).open()
        await pair.engine.objects.put("thing", "a", "me", b"in progress", hold=True)
        waiting = asyncio.ensure_future(pair.double.objects.get("thing", "a", "me", wait_seconds=60))
        with pytest.raises(ObjectHeldError):
            await other.engine.objects.change("thing", "a", "me", hold=True)
        pair.link.lose("died")
        pair.double.object_store.end_holds(3)
        assert await waiting == StoredObject(b"in progress", is_held=False)
        await other.engine.objects.change("thing", "a", "me", hold=True)
        other.link.lose("over")
        other.connection.abort()


async def test_a_hold_of_a_client_that_left_meanwhile_ends() -> None:
    async with connected() as pair:
        objects = pair.engine.objects
        await objects.put("thing", "a", "me", b"")
        taking = asyncio.ensure_future(objects.change("thing", "a", "me", hold=True))
        await asyncio.sleep(0)
        taking.cancel()
        await until(lambda: taking.done() and not pair.engine._calls)
        assert not (await objects.get("thing", "a", "me", wait_seconds=60)).is_held
        await objects.change("thing", "a", "me", hold=True)


async def test_large_objects_do_not_make_a_front_end_count_as_lost() -> None:
    async with connected(max_backlog_bytes=1_000_000) as pair:
        objects = pair.engine.objects
        await objects.put("thing", "a", "me", b"x" * 600_000)
        found = await asyncio.gather(*(objects.get("thing", "a", "me") for _ in range(10)), return_exceptions=True)
        refused = [each for each in found if isinstance(each, EngineUnavailableError)]
        sent = [each for each in found if isinstance(each, StoredObject)]
        assert len(refused) + len(sent) == 10
        assert sent
        assert all(len(each.data) == 600_000 for each in sent)
        assert not pair.link.lost.done()
        await objects.put("thing", "b", "me", b"x" * 2_000_000)
        with pytest.raises(EngineUnavailableError, match="too much is on its way"):
            await objects.get("thing", "b", "me")
        assert len((await objects.get("thing", "a", "me")).data) == 600_000


async def test_nothing_can_be_kept_without_the_engines_process() -> None:
    async with connected() as pair:
        pair.engine.fail("the engine's process has died")
        with pytest.raises(EngineUnavailableError):
            await pair.engine.objects.put("thing", "a", "me", b"")
