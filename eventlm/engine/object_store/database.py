"""The kept objects in SQLite: in memory, or in a file that only this process may use. One thread uses it.

What is over a bound is taken from the owner who has the most, so that one cannot take the place of others: the oldest
first, by the last changes, and what is held last. Triggers keep the totals, so that they are part of every transaction.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from eventlm.config import ServerConfig
from eventlm.config.structs import memory_bytes
from eventlm.engine.object_store.actions import (
    MAX_OBJECT_BYTES,
    MAX_PAGE_BYTES,
    ChangeObject,
    DeleteItem,
    DeleteObject,
    DuplicateItemError,
    GetItem,
    GetObject,
    ItemPage,
    Key,
    ListItems,
    ObjectAction,
    ObjectTooLargeError,
    PutObject,
    StoredItem,
    StoredObject,
    UnknownObjectError,
    key_of,
)
from eventlm.errors import UsageError
from eventlm.system.disk import SYSTEM_DISK, sync_path
from eventlm.types import NANOSECONDS_PER_SECOND

#: In the file's header: what it is (`evlm`), and the version of the tables below.
APPLICATION_ID = 0x65766C6D
SCHEMA_VERSION = 2
#: What a row takes beside its data.
ROW_BYTES = 128

_TABLES = """
CREATE TABLE object (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    changed_ns INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (owner, kind, id)
);
CREATE INDEX object_by_age ON object (changed_ns);
CREATE INDEX object_of_owner_by_age ON object (owner, changed_ns);
CREATE TABLE item (
    number INTEGER PRIMARY KEY,
    object INTEGER NOT NULL REFERENCES object (number) ON DELETE CASCADE,
    id TEXT NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (object, id)
);
CREATE INDEX item_in_order ON item (object, number);
CREATE INDEX item_by_id ON item (id);
CREATE TABLE total (owner TEXT PRIMARY KEY, num_objects INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
CREATE TRIGGER put AFTER INSERT ON object BEGIN
    INSERT INTO total VALUES (new.owner, 1, new.num_bytes) ON CONFLICT (owner) DO UPDATE
        SET num_objects = num_objects + 1, num_bytes = num_bytes + excluded.num_bytes;
END;
CREATE TRIGGER changed AFTER UPDATE OF num_bytes ON object BEGIN
    UPDATE total SET num_bytes = num_bytes - old.num_bytes + new.num_bytes WHERE owner = new.owner;
END;
CREATE TRIGGER deleted AFTER DELETE ON object BEGIN
    UPDATE total SET num_objects = num_objects - 1, num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
    DELETE FROM total WHERE owner = old.owner AND num_objects = 0;
END;
CREATE TRIGGER item_put AFTER INSERT ON item BEGIN
    UPDATE object SET num_bytes = num_bytes + length(new.data) + {row_bytes} WHERE number = new.object;
END;
CREATE TRIGGER item_deleted AFTER DELETE ON item BEGIN
    UPDATE object SET num_bytes = num_bytes - length(old.data) - {row_bytes} WHERE number = old.object;
END;
PRAGMA application_id = {application_id};
PRAGMA user_version = {version};
"""


class Bounds(NamedTuple):
    """Of all objects together, and how long one is kept after its last change."""

    max_objects: int
    max_bytes: int
    keep_ns: int

    @classmethod
    def of(cls, config: ServerConfig) -> Bounds:
        """As configured."""
        return cls(
            config.max_responses,
            memory_bytes(config.response_memory),
            config.response_seconds * NANOSECONDS_PER_SECOND,
        )


class Database:
    """An open database. `path` empty: in memory. now_ns: Unix time. held: what is held now.

    Raises UsageError for a file that cannot be used.
    """

    def __init__(self, path: str, bounds: Bounds, now_ns: Callable[[], int], held: Container[Key]) -> None:
        self._bounds = bounds
        self._now_ns = now_ns
        self._connection = _open_file(path) if path else _open(":memory:")
        self._connection.create_function("is_held", 3, lambda *key: key in held)

    def close(self) -> None:
        """Close it."""
        with contextlib.closing(self._connection):
            # This removes the journal, which is empty.
            self._execute("PRAGMA journal_mode = DELETE")

    def carry_out(self, action: ObjectAction) -> Any:
        """Do an action and return its result. Raises what `Objects` says, and sqlite3.Error; then nothing changed."""
        match action:
            case GetObject():
                return self._get(action)
            case ListItems():
                return self._list_items(action)
            case GetItem():
                return self._get_item(action)
        with self._transaction():
            self.expire()
            if isinstance(action, PutObject | ChangeObject) and action.also is not None:
                with contextlib.suppress(UnknownObjectError):
                    self._change(action.also)
            match action:
                case PutObject():
                    return self._put(action)
                case ChangeObject():
                    return self._change(action)
                case DeleteObject():
                    where = "owner = ? AND kind = ? AND id = ?"
                    return self._execute(f"DELETE FROM object WHERE {where}", *key_of(action)).rowcount > 0
                case DeleteItem():
                    number = self._find(action)
                    sql = "DELETE FROM item WHERE object = ? AND id = ?"
                    return self._execute(sql, number, action.item_id).rowcount > 0
                case _:
                    assert_never(action)

    def expire(self) -> int:
        """Delete what has expired. Returns how long until the next will, in nanoseconds."""
        free = "NOT is_held(owner, kind, id)"
        self._execute(f"DELETE FROM object WHERE changed_ns <= ? AND {free}", self._expired_ns)
        oldest = self._row(f"SELECT changed_ns FROM object WHERE {free} ORDER BY changed_ns LIMIT 1")
        return self._bounds.keep_ns if oldest is None else max(oldest[0] - self._expired_ns, 0)

    def totals(self) -> tuple[int, int]:
        """The number of objects and their bytes."""
        num_objects, num_bytes = self._row("SELECT total(num_objects), total(num_bytes) FROM total") or (0, 0)
        return int(num_objects), int(num_bytes)

    @property
    def _expired_ns(self) -> int:
        """What has not changed since then has expired."""
        return self._now_ns() - self._bounds.keep_ns

    def _put(self, action: PutObject) -> None:
        self._execute("DELETE FROM object WHERE owner = ? AND kind = ? AND id = ?", *key_of(action))
        _check_size(action.data, self._bounds.max_bytes)
        cursor = self._execute(
            "INSERT INTO object (owner, kind, id, changed_ns, num_bytes, data) VALUES (?, ?, ?, ?, ?, ?)",
            *key_of(action),
            self._now_ns(),
            len(action.data) + ROW_BYTES,
            action.data,
        )
        assert cursor.lastrowid is not None
        self._append(cursor.lastrowid, action.items)
        self._make_room(cursor.lastrowid, action.owner)

    def _change(self, action: ChangeObject) -> None:
        number = self._find(action)
        self._execute("UPDATE object SET changed_ns = ? WHERE number = ?", self._now_ns(), number)
        if action.data is not None:
            _check_size(action.data, self._bounds.max_bytes)
            self._execute(
                "UPDATE object SET num_bytes = num_bytes - length(data) + ?, data = ? WHERE number = ?",
                len(action.data),
                action.data,
                number,
            )
        self._append(number, action.items)
        self._make_room(number, action.owner)

    def _append(self, number: int, items: Sequence[StoredItem]) -> None:
        for item in items:
            _check_size(item.data, self._bounds.max_bytes)
            try:
                self._execute("INSERT INTO item (object, id, data) VALUES (?, ?, ?)", number, item.id, item.data)
            except sqlite3.IntegrityError:
                raise DuplicateItemError(item.id) from None

    def _make_room(self, number: int, owner: str) -> None:
        """Delete what is over the bounds, but not this object of the owner, which was just written."""
        bounds = self._bounds
        [num_bytes] = self._row("SELECT num_bytes FROM object WHERE number = ?", number) or [0]
        if num_bytes > bounds.max_bytes:
            raise ObjectTooLargeError(f"it has {num_bytes:,} bytes, more than the {bounds.max_bytes:,} for all")
        while True:
            num_objects, total_bytes = self.totals()
            if num_objects > max(bounds.max_objects, 1):
                most = "num_objects"
            elif total_bytes > bounds.max_bytes:
                most = "num_bytes"
            else:
                return
            found = self._first_to_go(number, owner, most)
            if found is None:
                raise ObjectTooLargeError(f"it has {num_bytes:,} bytes, and others need the rest of the room")
            self._execute("DELETE FROM object WHERE number = ?", found)

    def _first_to_go(self, number: int, writer: str, most: str) -> int | None:
        """An object of the owner who has the most, but not this one of the writer; None if that is the only one."""
        [owner] = self._row(f"SELECT owner FROM total ORDER BY {most} DESC, owner = ?, owner LIMIT 1", writer) or [""]
        for condition in ("NOT is_held(owner, kind, id)", "TRUE"):
            where = f"owner = ? AND number != ? AND {condition}"
            row = self._row(f"SELECT number FROM object WHERE {where} ORDER BY changed_ns LIMIT 1", owner, number)
            if row is not None:
                found: int = row[0]
                return found
        return None

    def _get(self, action: GetObject) -> StoredObject:
        [data] = self._row("SELECT data FROM object WHERE number = ?", self._find(action)) or [b""]
        return StoredObject(data)

    def _list_items(self, action: ListItems) -> ItemPage:
        number = self._find(action)
        sign, order = ("<", "DESC") if action.is_descending else (">", "ASC")
        after, parameters = "", [number]
        if action.after:
            row = self._row("SELECT number FROM item WHERE object = ? AND id = ?", number, action.after)
            if row is None:
                raise UnknownObjectError(f"there is no item '{action.after}' in '{action.id}'")
            after = f"AND number {sign} ?"
            parameters += row
        rows = self._execute(
            f"SELECT id, data FROM item WHERE object = ? {after} ORDER BY number {order} LIMIT ?",
            *parameters,
            action.limit + 1,
        )
        items: list[StoredItem] = []
        num_bytes = 0
        for item in rows:
            if len(items) == action.limit or num_bytes >= MAX_PAGE_BYTES:
                return ItemPage(items, has_more=True)
            items.append(StoredItem(*item))
            num_bytes += len(item[1])
        return ItemPage(items, has_more=False)

    def _get_item(self, action: GetItem) -> bytes:
        if action.id:
            row = self._row("SELECT data FROM item WHERE object = ? AND id = ?", self._find(action), action.item_id)
        else:
            row = self._row(
                "SELECT item.data FROM item JOIN object ON object.number = item.object WHERE item.id = ? AND owner = ? "
                "AND (changed_ns > ? OR is_held(owner, kind, object.id)) ORDER BY item.number DESC LIMIT 1",
                action.item_id,
                action.owner,
                self._expired_ns,
            )
        if row is None:
            raise UnknownObjectError(f"there is no item '{action.item_id}', or it is no longer kept")
        data: bytes = row[0]
        return data

    def _find(self, action: ChangeObject | GetObject | ListItems | GetItem | DeleteItem) -> int:
        """An object's number. Raises UnknownObjectError."""
        row = self._row(
            "SELECT number FROM object WHERE owner = ? AND kind = ? AND id = ? "
            "AND (changed_ns > ? OR is_held(owner, kind, id))",
            *key_of(action),
            self._expired_ns,
        )
        if row is None:
            raise UnknownObjectError(f"there is no {action.kind} '{action.id}', or it is no longer kept")
        number: int = row[0]
        return number

    def _execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        return self._connection.execute(sql, parameters)

    def _row(self, sql: str, *parameters: Any) -> Sequence[Any] | None:
        found: Sequence[Any] | None = self._execute(sql, *parameters).fetchone()
        return found

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        finally:
            # After some errors SQLite has done it.
            if self._connection.in_transaction:
                self._execute("ROLLBACK")


def check_file(config: ServerConfig) -> None:
    """Raise UsageError if `response_store` names a file that cannot be used. Makes the file if there is none."""
    if config.response_store:
        connection = _open_file(config.response_store)
        try:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            found = str(error)
        finally:
            connection.close()
        if found != "ok":
            raise _damaged(config.response_store, found.splitlines()[-1])


def _check_size(data: bytes, max_bytes: int) -> None:
    most = min(MAX_OBJECT_BYTES, max_bytes)
    if len(data) > most:
        raise ObjectTooLargeError(f"it has {len(data):,} bytes, more than the {most:,} that one may have")


def _open_file(path: str) -> sqlite3.Connection:
    """Raises UsageError."""
    _check_mode(path)
    try:
        return _open(str(Path(path).absolute()))
    except _ForeignError as error:
        raise _refused(path, f"{error}; give another file") from None
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise _refused(path, "another server uses it; stop that one or give another file") from error
        raise _refused(path, f"{error}; give another file, or repair this one's folder") from error
    except sqlite3.DatabaseError as error:
        raise _damaged(path, str(error)) from error


def _open(path: str) -> sqlite3.Connection:
    # The store's thread opens and uses it; its transactions are written out.
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        # Locked from the first access on, so that two servers cannot share a file.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA foreign_keys = ON")
        # What is deleted must be gone from the file.
        connection.execute("PRAGMA secure_delete = ON")
        _check_or_make_tables(connection)
        # Nor may it be left in another file.
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        # NORMAL would not sync the emptied journal, which a power failure could bring back and undo what was answered.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA temp_store = MEMORY")
    except BaseException:
        connection.close()
        raise
    return connection


class _ForeignError(Exception):
    """The file is a database of something else."""


def _check_or_make_tables(connection: sqlite3.Connection) -> None:
    [application_id] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    [num_tables] = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not num_tables and not application_id:
        tables = _TABLES.format(row_bytes=ROW_BYTES, application_id=APPLICATION_ID, version=SCHEMA_VERSION)
        connection.executescript(f"BEGIN EXCLUSIVE; {tables} COMMIT;")
    elif application_id != APPLICATION_ID:
        raise _ForeignError("it is a database of another program")
    elif version != SCHEMA_VERSION:
        raise _ForeignError(f"another version of eventlm wrote it (tables {version}, this one has {SCHEMA_VERSION})")


def _check_mode(path: str) -> None:
    """Make the file, under a name that survives a power failure, or check that nobody else may read it. Raises
    UsageError.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            mode = os.fstat(descriptor).st_mode
        finally:
            os.close(descriptor)
        sync_path(SYSTEM_DISK, Path(path).parent)
    except FileNotFoundError as error:
        raise _refused(path, f"there is no folder {Path(path).parent}; make it or give another file") from error
    except OSError as error:
        raise _refused(path, f"{error.strerror}; give another file") from error
    if not stat.S_ISREG(mode):
        raise _refused(path, "it is not a regular file; give another one")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise _refused(path, f"it holds prompts and others may read it: chmod 600 {path}")


def _damaged(path: str, reason: str) -> UsageError:
    return _refused(path, f"it is damaged or not a database ({reason}); move it away or give another file")


def _refused(path: str, reason: str) -> UsageError:
    return UsageError(f"cannot keep responses in {path}: {reason}")
