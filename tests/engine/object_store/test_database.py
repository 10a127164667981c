"""The tables: owners, items in order, bounds, holds, and files that cannot be used."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.config import ServerConfig
from eventlm.engine.object_store import database
from eventlm.engine.object_store.actions import (
    ChangeObject,
    DuplicateItemError,
    ItemPage,
    ObjectTooLargeError,
    StoredItem,
    UnknownObjectError,
)
from eventlm.engine.object_store.database import ROW_BYTES, SCHEMA_VERSION, Bounds, Database, check_file
from eventlm.errors import UsageError
from eventlm.system.disk import SystemDisk
from tests.engine.object_store.databases import KEEP_NS, NO_BOUNDS, Desk, items


def test_an_object_is_there_for_its_owner_and_kind_only() -> None:
    desk = Desk()
    desk.put("a", b"mine")
    desk.put("a", b"yours", owner="you")
    desk.put("a", b"another kind", kind="other")
    assert desk.get("a") == b"mine"
    assert desk.get("a", owner="you") == b"yours"
    assert desk.get("a", owner="") is None
    assert not desk.delete("a", owner="somebody else")
    with pytest.raises(UnknownObjectError):
        desk.change("a", owner="somebody else", data=b"overwritten")
    assert desk.delete("a")
    assert not desk.delete("a")
    assert desk.get("a") is None
    assert desk.get("a", owner="you") == b"yours"
    assert desk.get("a", kind="other") == b"another kind"


def test_an_object_that_is_put_again_is_another_one() -> None:
    desk = Desk()
    desk.put("a", b"first", items=items("1", "2"))
    desk.put("a", b"second", items=items("3"))
    assert desk.get("a") == b"second"
    assert desk.item_ids("a") == ["3"]


def test_a_change_replaces_the_data_and_appends_items() -> None:
    desk = Desk()
    desk.put("a", b"first", items=items("1"))
    desk.change("a", data=b"second")
    assert (desk.get("a"), desk.item_ids("a")) == (b"second", ["1"])
    desk.change("a", items=items("2", "3"))
    assert (desk.get("a"), desk.item_ids("a")) == (b"second", ["1", "2", "3"])
    with pytest.raises(UnknownObjectError):
        desk.change("b", data=b"was deleted")
    assert desk.get("b") is None


def test_an_item_cannot_be_there_twice_and_the_rest_of_such_a_change_is_undone() -> None:
    desk = Desk()
    desk.put("a", b"first", items=items("1"))
    with pytest.raises(DuplicateItemError, match=r"^1$"):
        desk.change("a", data=b"second", items=items("2", "1"))
    assert (desk.get("a"), desk.item_ids("a")) == (b"first", ["1"])
    with pytest.raises(DuplicateItemError, match=r"^3$"):
        desk.put("b", items=items("3", "3"))
    assert desk.get("b") is None
    desk.put("b", items=items("1"))
    assert desk.item_ids("b") == ["1"]


def test_another_object_changes_in_the_same_step_or_neither_does() -> None:
    desk = Desk()
    desk.put("a", items=items("1"))

    def also(*ids: str, id: str = "a") -> ChangeObject:
        return ChangeObject(kind="thing", id=id, owner="me", items=items(*ids))

    desk.put("b", b"first", also=also("2"))
    desk.change("b", data=b"second", also=also("3"))
    with pytest.raises(DuplicateItemError, match=r"^1$"):
        desk.put("c", also=also("1"))
    with pytest.raises(DuplicateItemError, match=r"^1$"):
        desk.change("b", data=b"third", also=also("4", "1"))
    with pytest.raises(UnknownObjectError):
        desk.change("c", data=b"gone", also=also("4"))
    assert (desk.item_ids("a"), desk.get("b"), desk.get("c")) == (["1", "2", "3"], b"second", None)
    desk.put("c", b"alone", also=also("1", id="d"))
    assert (desk.get("c"), desk.get("d")) == (b"alone", None)


@pytest.mark.parametrize(
    ("fields", "ids", "has_more"),
    [
        ({}, ["1", "2", "3", "4"], False),
        ({"limit": 4}, ["1", "2", "3", "4"], False),
        ({"limit": 3}, ["1", "2", "3"], True),
        ({"limit": 2, "after": "1"}, ["2", "3"], True),
        ({"after": "2"}, ["3", "4"], False),
        ({"after": "4"}, [], False),
        ({"is_descending": True}, ["4", "3", "2", "1"], False),
        ({"is_descending": True, "limit": 1}, ["4"], True),
        ({"is_descending": True, "after": "3"}, ["2", "1"], False),
    ],
)
def test_items_come_in_pages(fields: dict[str, Any], ids: list[str], has_more: bool) -> None:
    desk = Desk()
    desk.put("other", items=items("9"))
    desk.put("a", items=items("1"))
    desk.change("other", items=items("8"))
    desk.change("a", items=items("2", "3"))
    desk.change("a", items=items("4"))
    assert desk.page("a", **fields) == ItemPage(items(*ids), has_more)


def test_a_page_follows_an_item_that_is_there() -> None:
    desk = Desk()
    desk.put("a", items=items("1"))
    desk.put("b", items=items("2"))
    others: list[dict[str, Any]] = [{"after": "2"}, {"owner": "you"}, {"kind": "other"}]
    for fields in others:
        with pytest.raises(UnknownObjectError):
            desk.page("a", **fields)


def test_a_page_ends_before_it_is_too_long_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MAX_PAGE_BYTES", 10)
    desk = Desk()
    desk.put("a", items=[StoredItem(str(number), b"1234") for number in range(5)])
    assert [item.id for item in desk.page("a").items] == ["0", "1", "2"]
    assert desk.page("a").has_more
    assert not desk.page("a", after="2").has_more


def test_an_item_is_found_in_its_object_or_in_any_of_the_owner() -> None:
    desk = Desk()
    desk.put("a", items=[StoredItem("1", b"old")])
    desk.put("b", items=[StoredItem("1", b"new"), StoredItem("2", b"two")])
    assert desk.get_item("1", id="a") == b"old"
    assert desk.get_item("1") == b"new"
    assert desk.get_item("2", id="a") is None
    assert desk.get_item("1", owner="you") is None
    assert not desk.delete_item("a", "2")
    assert desk.delete_item("b", "1")
    assert desk.get_item("1") == b"old"
    with pytest.raises(UnknownObjectError):
        desk.delete_item("b", "2", owner="you")
    desk.now_ns += KEEP_NS
    assert desk.get_item("1") is None


def test_what_was_not_changed_for_long_is_gone() -> None:
    desk = Desk()
    desk.put("a")
    desk.now_ns += 1
    desk.put("b", items=items("1"))
    assert desk.database.expire() == KEEP_NS - 1
    desk.now_ns += KEEP_NS - 1
    assert desk.present("a", "b") == ["b"]
    # Hidden first, and deleted with the next change.
    assert desk.database.totals()[0] == 2
    desk.change("b", items=items("2"))
    desk.now_ns += 1
    assert desk.present("a", "b") == ["b"]
    assert desk.database.totals() == (1, 3 * ROW_BYTES + 2)
    desk.now_ns += KEEP_NS
    assert desk.database.expire() == KEEP_NS
    assert desk.database.totals() == (0, 0)


def test_the_oldest_go_when_there_are_too_many() -> None:
    desk = Desk(bounds=NO_BOUNDS._replace(max_objects=3))
    for id in "abc":
        desk.now_ns += 1
        desk.put(id, owner="me" if id != "c" else "you")
    desk.change("a", items=items("1"))
    desk.now_ns += 1
    desk.put("d")
    assert desk.present("a", "b", "d") == ["a", "d"]
    assert desk.get("c", owner="you") == b""


def test_the_oldest_go_when_there_are_too_many_bytes() -> None:
    desk = Desk(bounds=NO_BOUNDS._replace(max_bytes=3 * (ROW_BYTES + 100)))
    for id in "abc":
        desk.now_ns += 1
        desk.put(id, b"x" * 100)
    assert desk.present("a", "b", "c") == ["a", "b", "c"]
    desk.change("c", data=b"x" * 101)
    assert desk.present("a", "b", "c") == ["b", "c"]
    desk.change("c", items=items("1"))
    assert desk.present("b", "c") == ["b", "c"]
    desk.change("c", items=items("2"))
    assert desk.present("b", "c") == ["c"]
    assert desk.database.totals() == (1, 101 + 2 + 3 * ROW_BYTES)


def test_what_is_larger_than_all_may_be_is_refused_and_nothing_goes_for_it() -> None:
    desk = Desk(bounds=NO_BOUNDS._replace(max_bytes=2000))
    desk.put("a", b"x" * 500)
    for fields in ({"data": b"x" * 2001}, {"data": b"x" * 1990}, {"items": [StoredItem("1", b"x" * 2001)]}):
        with pytest.raises(ObjectTooLargeError):
            desk.put("b", **fields)
    with pytest.raises(ObjectTooLargeError):
        desk.change("a", items=[StoredItem("1", b"x" * 1000), StoredItem("2", b"x" * 1000)])
    assert desk.present("a", "b") == ["a"]
    assert desk.item_ids("a") == []


def test_one_object_has_to_fit_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MAX_OBJECT_BYTES", 10)
    desk = Desk()
    with pytest.raises(ObjectTooLargeError, match="it has 11 bytes, more than the 10 that one may have"):
        desk.put("a", b"x" * 11)
    with pytest.raises(ObjectTooLargeError):
        desk.put("a", items=[StoredItem("1", b"x" * 11)])
    desk.put("a", b"x" * 10, items=[StoredItem(str(number), b"x" * 10) for number in range(10)])


def test_what_is_held_stays_as_long_as_it_can() -> None:
    desk = Desk(bounds=NO_BOUNDS._replace(max_objects=2))
    desk.put("a", items=items("1"))
    desk.hold("a")
    for id in "bcd":
        desk.now_ns += 1
        desk.put(id)
    assert desk.present("a", "b", "c", "d") == ["a", "d"]
    desk.now_ns += KEEP_NS
    assert desk.present("a", "d") == ["a"]
    assert desk.get_item("1") == b"1"
    assert desk.database.expire() == KEEP_NS
    assert desk.database.totals()[0] == 1
    # The bound holds all the same.
    desk.put("e")
    desk.hold("e")
    desk.put("f")
    assert desk.present("a", "e", "f") == ["e", "f"]


def test_the_owner_of_the_most_objects_makes_room() -> None:
    desk = Desk(bounds=NO_BOUNDS._replace(max_objects=4))
    for id in "ab":
        desk.put(id, owner="you")
    for id in "cdefgh":
        desk.now_ns += 1
        desk.put(id)
    assert desk.present(*"cdefgh") == ["g", "h"]
    # With as many as others have, one does not lose what one has just begun.
    desk.put("i", owner="they")
    assert desk.present(*"gh") == ["h"]
    assert [desk.get(id, owner="you") for id in "ab"] == [b"", b""]
    desk.now_ns += 1
    desk.put("j", owner="you")
    assert [desk.get(id, owner="you") for id in "abj"] == [None, b"", b""]
    assert desk.get("i", owner="they") == b""


def test_the_owner_of_the_most_bytes_makes_room() -> None:
    desk = Desk(bounds=NO_BOUNDS._replace(max_bytes=1000 + 5 * ROW_BYTES))
    for id in "ab":
        desk.put(id, b"x" * 100, owner="you")
    for id in "cde":
        desk.now_ns += 1
        desk.put(id, b"x" * 300)
    assert desk.present(*"cde") == ["d", "e"]
    desk.hold("d")
    desk.now_ns += 1
    desk.put("f", b"x" * 250, owner="you")
    assert desk.present(*"de") == ["d"]
    assert [desk.get(id, owner="you") is not None for id in "abf"] == [True, True, True]
    # The room of others is not for what one has alone.
    desk.delete("d")
    with pytest.raises(ObjectTooLargeError, match="others need the rest of the room"):
        desk.put("g", b"x" * 900)
    assert [desk.get(id, owner="you") is not None for id in "abf"] == [True, True, True]


def test_all_is_there_again_after_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    desk = Desk(path)
    desk.put("a", b"\0\xff", items=items("1", "2"))
    totals = desk.database.totals()
    desk.database.close()
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    desk = Desk(path)
    assert desk.get("a") == b"\0\xff"
    assert desk.item_ids("a") == ["1", "2"]
    assert desk.database.totals() == totals
    desk.database.close()


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    child = os.fork()
    if not child:
        desk = Desk(path)
        desk.put("a", b"kept")
        os._exit(0)
    os.waitpid(child, 0)
    desk = Desk(path)
    assert desk.get("a") == b"kept"
    desk.database.close()


def test_what_is_answered_is_synced_with_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(SystemDisk, "sync_folder", lambda self, path: synced.append(path))
    desk = Desk(str(tmp_path / "store"))
    assert synced == [tmp_path, *tmp_path.parents]
    # FULL; of a journal that is truncated, NORMAL does not sync the end.
    assert desk.database._row("PRAGMA synchronous") == (2,)
    desk.database.close()


def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        desk = Desk(str(tmp_path / "store"))
        desk.put("a")
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert modes == {"store": 0o600, "store-journal": 0o600}
    desk.database.close()


def _delete(desk: Desk) -> None:
    desk.delete("a")


def _replace(desk: Desk) -> None:
    desk.put("a", b"shorter")


def _expire(desk: Desk) -> None:
    desk.now_ns += KEEP_NS
    desk.database.expire()


def _evict(desk: Desk) -> None:
    desk.now_ns += 1
    for number in range(2):
        desk.put(str(number))


@pytest.mark.parametrize("lose", [_delete, _replace, _expire, _evict])
def test_what_is_deleted_is_in_no_file_any_more(tmp_path: Path, lose: Callable[[Desk], None]) -> None:
    desk = Desk(str(tmp_path / "store"), NO_BOUNDS._replace(max_objects=2))

    def secrets() -> int:
        return sum(each.read_bytes().count(b"a secret") for each in tmp_path.iterdir())

    desk.put("a", b"a secret prompt" * 1000, items=[StoredItem("1", b"a secret item")])
    # Some are on two pages.
    assert secrets() > 900
    lose(desk)
    # The server goes on.
    assert secrets() == 0
    desk.database.close()


def _sqlite(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(sql)
    connection.close()


def _make_folder(path: Path) -> None:
    path.mkdir()


def _make_readable(path: Path) -> None:
    path.touch(0o600)
    path.chmod(0o640)


def _write_text(path: Path) -> None:
    path.write_text("This is no database. " * 100)
    path.chmod(0o600)


def _make_foreign(path: Path) -> None:
    path.touch(0o600)
    _sqlite(path, "CREATE TABLE cookies (name TEXT)")


def _make_newer(path: Path) -> None:
    Desk(str(path)).database.close()
    _sqlite(path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def _damage(path: Path) -> None:
    desk = Desk(str(path))
    for number in range(100):
        desk.put(str(number), b"x" * 1000)
    desk.database.close()
    data = bytearray(path.read_bytes())
    data[4096:8192] = os.urandom(4096)
    path.write_bytes(data)


def _cut(path: Path) -> None:
    desk = Desk(str(path))
    desk.put("a", b"x" * 100_000)
    desk.database.close()
    os.truncate(path, 20_000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_make_folder, "Is a directory; give another file"),
        (os.mkfifo, "it is not a regular file; give another one"),
        (_make_readable, "it holds prompts and others may read it: chmod 600 "),
        (_write_text, "it is damaged or not a database (file is not a database); move it away or give another file"),
        (_make_foreign, "it is a database of another program; give another file"),
        (_make_newer, "another version of eventlm wrote it (tables 3, this one has 2); give another file"),
        (_damage, "it is damaged or not a database ("),
        (_cut, "it is damaged or not a database ("),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    path = tmp_path / "store"
    make(path)
    with pytest.raises(UsageError) as refusal:
        check_file(ServerConfig(response_store=str(path)))
    assert str(refusal.value).startswith(f"cannot keep responses in {path}: {message}")
    assert "\n" not in str(refusal.value)


def test_a_file_needs_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "none" / "store"
    with pytest.raises(UsageError, match=f"there is no folder {tmp_path}/none; make it or give another file"):
        check_file(ServerConfig(response_store=str(path)))


def test_a_file_that_another_server_uses_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    first = Desk(path)
    with pytest.raises(UsageError, match="another server uses it; stop that one or give another file"):
        check_file(ServerConfig(response_store=path))
    with pytest.raises(UsageError, match="another server uses it"):
        Desk(path)
    first.put("a", b"still works")
    first.database.close()
    check_file(ServerConfig(response_store=path))
    assert Desk(path).get("a") == b"still works"


def test_no_file_needs_no_check() -> None:
    check_file(ServerConfig())


def test_bounds_are_as_configured() -> None:
    config = ServerConfig(max_responses=5, response_memory="2KiB", response_seconds=3)
    assert Bounds.of(config) == Bounds(max_objects=5, max_bytes=2048, keep_ns=3_000_000_000)
    assert Database("", Bounds.of(config), lambda: 0, ()).totals() == (0, 0)
