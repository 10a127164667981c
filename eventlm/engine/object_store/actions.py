"""What can be done with kept objects, as messages, and `Objects`, which sends them.

An object is opaque bytes by kind and id. It may have items: opaque bytes too, with ids of their own, in the order in
which they were added. Every object belongs to an owner (see `Principal.owner`); to any other, it does not exist.

A process that works on an object holds it. Only one can, and what it holds does not expire, and is evicted only when
its owner has nothing else that can go. When the process dies, its holds end, so an object that should be held and is
not was left unfinished. Holds are not written down with the objects, so one can always end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Union

from msgspec import Struct

from eventlm.errors import EventLMError

#: Longest object without its items, and longest item. An object must fit into a message to a front end.
MAX_OBJECT_BYTES = 32 * 1024 * 1024
#: A page of items ends after the item that makes it this long.
MAX_PAGE_BYTES = 8 * 1024 * 1024


class ObjectStoreError(EventLMError):
    """The store cannot be read or written at the moment: a full disk, an I/O error."""


class UnknownObjectError(EventLMError):
    """There is no such object or item, it is no longer kept, or it belongs to another owner."""


class ObjectHeldError(EventLMError):
    """Another request works on the object."""


class DuplicateItemError(EventLMError):
    """The object has an item of this id already. The message is the id."""


class ObjectTooLargeError(EventLMError):
    """The object would be larger than what may be kept."""


class StoredItem(Struct, frozen=True, array_like=True):
    """One item of an object."""

    id: str
    data: bytes


class StoredObject(Struct, frozen=True, array_like=True):
    """An object without its items."""

    data: bytes
    is_held: bool = False


class ItemPage(Struct, frozen=True, array_like=True):
    """Items in order, and whether more follow."""

    items: list[StoredItem]
    has_more: bool


class ChangeObject(Struct, frozen=True, kw_only=True, tag="change"):
    """See `Objects.change`. holder: the number of the front end, 0 for the engine's process."""

    kind: str
    id: str
    owner: str
    data: bytes | None = None
    items: Sequence[StoredItem] = []
    hold: bool | None = None
    holder: int = 0
    also: ChangeObject | None = None
    result_type: ClassVar[Any] = None

    @property
    def writes(self) -> bool:
        """Whether it does more than to hold the object or to end the hold."""
        return self.data is not None or bool(self.items) or self.also is not None


class PutObject(Struct, frozen=True, kw_only=True, tag="put"):
    """See `Objects.put`."""

    kind: str
    id: str
    owner: str
    data: bytes
    items: Sequence[StoredItem] = []
    hold: bool = False
    holder: int = 0
    also: ChangeObject | None = None
    result_type: ClassVar[Any] = None


class GetObject(Struct, frozen=True, kw_only=True, tag="get"):
    """See `Objects.get`."""

    kind: str
    id: str
    owner: str
    wait_seconds: float = 0
    result_type: ClassVar[Any] = StoredObject


class DeleteObject(Struct, frozen=True, kw_only=True, tag="delete"):
    """See `Objects.delete`."""

    kind: str
    id: str
    owner: str
    result_type: ClassVar[Any] = bool


class ListItems(Struct, frozen=True, kw_only=True, tag="list_items"):
    """See `Objects.list_items`."""

    kind: str
    id: str
    owner: str
    after: str = ""
    limit: int
    is_descending: bool = False
    result_type: ClassVar[Any] = ItemPage


class GetItem(Struct, frozen=True, kw_only=True, tag="get_item"):
    """See `Objects.get_item` and `Objects.find_item`."""

    owner: str
    item_id: str
    kind: str = ""
    id: str = ""
    result_type: ClassVar[Any] = bytes


class DeleteItem(Struct, frozen=True, kw_only=True, tag="delete_item"):
    """See `Objects.delete_item`."""

    kind: str
    id: str
    owner: str
    item_id: str
    result_type: ClassVar[Any] = bool


#: Of an object: its owner, kind and id.
Key = tuple[str, str, str]
ObjectAction = Union[  # noqa: UP007
    PutObject, ChangeObject, GetObject, DeleteObject, ListItems, GetItem, DeleteItem
]


def key_of(action: ObjectAction) -> Key:
    """The object of an action."""
    return action.owner, action.kind, action.id


class Objects:
    """The kept objects, from any process that serves HTTP. `carry_out` does an action and returns its result.

    Every method raises ObjectStoreError, and EngineUnavailableError if the engine's process is gone. A caller that is
    cancelled while it waits for a hold does not get it.
    """

    def __init__(self, carry_out: Callable[[ObjectAction], Coroutine[Any, Any, Any]]) -> None:
        self._carry_out = carry_out

    async def put(
        self,
        kind: str,
        id: str,
        owner: str,
        data: bytes,
        items: Sequence[StoredItem] = (),
        *,
        hold: bool = False,
        also: ChangeObject | None = None,
    ) -> None:
        """Keep a new object, or replace one and its items. Raises ObjectTooLargeError or DuplicateItemError.

        also: a change in the same step of another object, if there is that one; it holds nothing.
        """
        await self._write(PutObject(kind=kind, id=id, owner=owner, data=data, items=items, hold=hold, also=also))

    async def change(
        self,
        kind: str,
        id: str,
        owner: str,
        data: bytes | None = None,
        items: Sequence[StoredItem] = (),
        *,
        hold: bool | None = None,
        also: ChangeObject | None = None,
    ) -> None:
        """In one step: replace an object's data, append items, and hold it (True) or end the hold (False).
        also: as in `put`.

        A call that only ends the hold does nothing else, and raises nothing. Others raise UnknownObjectError,
        ObjectHeldError if a hold is wanted and there is one, ObjectTooLargeError or DuplicateItemError; then nothing
        has changed.
        """
        change = ChangeObject(kind=kind, id=id, owner=owner, data=data, items=items, hold=hold, also=also)
        await self._write(change)

    async def get(self, kind: str, id: str, owner: str, *, wait_seconds: float = 0) -> StoredObject:
        """An object. Waits up to `wait_seconds` while it is held. Raises UnknownObjectError."""
        found: StoredObject = await self._carry_out(GetObject(kind=kind, id=id, owner=owner, wait_seconds=wait_seconds))
        return found

    async def delete(self, kind: str, id: str, owner: str) -> bool:
        """Delete an object and its items. Returns whether there was one."""
        was_kept: bool = await self._carry_out(DeleteObject(kind=kind, id=id, owner=owner))
        return was_kept

    async def list_items(
        self, kind: str, id: str, owner: str, *, after: str = "", limit: int, is_descending: bool = False
    ) -> ItemPage:
        """Up to `limit` items of an object after the item `after`, the oldest first unless `is_descending`.

        A page may be shorter than `limit` and still have more after it. Raises UnknownObjectError, also for `after`.
        """
        page: ItemPage = await self._carry_out(
            ListItems(kind=kind, id=id, owner=owner, after=after, limit=limit, is_descending=is_descending)
        )
        return page

    async def get_item(self, kind: str, id: str, owner: str, item_id: str) -> bytes:
        """One item of an object. Raises UnknownObjectError."""
        data: bytes = await self._carry_out(GetItem(kind=kind, id=id, owner=owner, item_id=item_id))
        return data

    async def find_item(self, owner: str, item_id: str) -> bytes:
        """The newest item of this id in any object of the owner. Raises UnknownObjectError."""
        data: bytes = await self._carry_out(GetItem(owner=owner, item_id=item_id))
        return data

    async def delete_item(self, kind: str, id: str, owner: str, item_id: str) -> bool:
        """Delete one item of an object. Returns whether there was one. Raises UnknownObjectError without the object."""
        was_kept: bool = await self._carry_out(DeleteItem(kind=kind, id=id, owner=owner, item_id=item_id))
        return was_kept

    async def _write(self, action: PutObject | ChangeObject) -> None:
        call = asyncio.ensure_future(self._carry_out(action))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(lambda _: self._end_hold(action, call))
            raise

    def _end_hold(self, action: PutObject | ChangeObject, call: asyncio.Future[Any]) -> None:
        """Undo a hold for which nobody waited to the end."""
        if not call.cancelled() and call.exception() is None and action.hold:
            undo = ChangeObject(kind=action.kind, id=action.id, owner=action.owner, hold=False)
            # An error is in the log already.
            asyncio.ensure_future(self._carry_out(undo)).add_done_callback(asyncio.Future.exception)
