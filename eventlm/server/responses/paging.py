"""Lists of items, in pages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from eventlm.errors import InputError
from eventlm.server.endpoints.openapi import Parameter

MAX_PAGE_ITEMS = 100
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE_ITEMS)]
Order = Literal["asc", "desc"]


class PageQuery(Struct, frozen=True, kw_only=True):
    """Which items of a list are wanted."""

    after: str = ""
    limit: Limit = 20
    order: Order = "desc"


class ItemList(Struct, frozen=True, kw_only=True):
    """A page of items. Without any, `first_id` and `last_id` are null."""

    object: str = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


INCLUDE = Parameter("include[]", "query", list[str], "Further fields. What was generated with them has them anyway.")
PAGE_PARAMETERS = (
    Parameter("after", "query", str, "The id of the item before the page."),
    Parameter("limit", "query", Limit, "Most items of the page, 20 if not given."),
    Parameter("order", "query", Order, "asc: the oldest first; desc, if not given: the newest first."),
    INCLUDE,
)


def item_list(items: list[tuple[str, Any]], *, has_more: bool) -> ItemList:
    """A page of items, each with its id."""
    ids: list[str | None] = [*(id for id, _ in items)] or [None]
    return ItemList(data=[data for _, data in items], first_id=ids[0], last_id=ids[-1], has_more=has_more)


def no_item_to_follow(after: str) -> InputError:
    """400: `after` names no item of the list."""
    return InputError("after", f"Invalid value for 'after': there is no item '{after}' in this list.")
