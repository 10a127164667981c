"""Databases with small bounds and a clock that is set by hand."""

from __future__ import annotations

from typing import Any

from eventlm.engine.object_store.actions import (
    ChangeObject,
    DeleteItem,
    DeleteObject,
    GetItem,
    GetObject,
    ItemPage,
    Key,
    ListItems,
    PutObject,
    StoredItem,
    UnknownObjectError,
)
from eventlm.engine.object_store.database import Bounds, Database

KEEP_NS = 1000
NO_BOUNDS = Bounds(max_objects=1_000_000, max_bytes=1 << 30, keep_ns=KEEP_NS)


class Desk:
    """A database as one owner after another uses it. Kinds are `thing` if not given."""

    def __init__(self, path: str = "", bounds: Bounds = NO_BOUNDS) -> None:
        self.now_ns = 10_000
        self.held: set[Key] = set()
        self.database = Database(path, bounds, lambda: self.now_ns, self.held)

    def put(self, id: str, data: bytes = b"", owner: str = "me", kind: str = "thing", **fields: Any) -> None:
        self.database.carry_out(PutObject(kind=kind, id=id, owner=owner, data=data, **fields))

    def change(self, id: str, owner: str = "me", kind: str = "thing", **fields: Any) -> None:
        self.database.carry_out(ChangeObject(kind=kind, id=id, owner=owner, **fields))

    def get(self, id: str, owner: str = "me", kind: str = "thing") -> bytes | None:
        """None if there is none."""
        try:
            data: bytes = self.database.carry_out(GetObject(kind=kind, id=id, owner=owner)).data
        except UnknownObjectError:
            return None
        return data

    def hold(self, id: str) -> None:
        self.held.add(("me", "thing", id))

    def delete(self, id: str, owner: str = "me", kind: str = "thing") -> bool:
        return bool(self.database.carry_out(DeleteObject(kind=kind, id=id, owner=owner)))

    def page(self, id: str, owner: str = "me", kind: str = "thing", limit: int = 10, **fields: Any) -> ItemPage:
        page = self.database.carry_out(ListItems(kind=kind, id=id, owner=owner, limit=limit, **fields))
        assert isinstance(page, ItemPage)
        return page

    def item_ids(self, id: str, **fields: Any) -> list[str]:
        return [item.id for item in self.page(id, **fields).items]

    def get_item(self, item_id: str, owner: str = "me", id: str = "") -> bytes | None:
        """In any object unless one is named; None if there is none."""
        try:
            data: bytes = self.database.carry_out(GetItem(kind="thing", id=id, owner=owner, item_id=item_id))
        except UnknownObjectError:
            return None
        return data

    def delete_item(self, id: str, item_id: str, owner: str = "me") -> bool:
        return bool(self.database.carry_out(DeleteItem(kind="thing", id=id, owner=owner, item_id=item_id)))

    def present(self, *ids: str) -> list[str]:
        """Which of these are there."""
        return [id for id in ids if self.get(id) is not None]


def items(*ids: str) -> list[StoredItem]:
    """Items whose data are their ids."""
    return [StoredItem(id, id.encode()) for id in ids]
