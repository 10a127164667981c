"""What responses have to do with earlier ones: the items before an input, and where a finished response is kept."""

from __future__ import annotations

from collections.abc import Sequence

from eventlm.errors import InputError
from eventlm.server.api import Caller
from eventlm.server.context import ServerContext
from eventlm.server.responses.protocol import InputFields, InputItem, ResponsesRequest
from eventlm.server.responses.replies import Response


async def earlier_items(context: ServerContext, body: InputFields, caller: Caller) -> list[InputItem]:
    """The items before the body's own: those of `previous_response_id`, or of `conversation`.

    Raises InputError or ApiError.
    """
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name, None):
            raise InputError(name, f"'{name}' is not supported: no responses are kept; send all items as 'input'.")
    return []


async def referenced_items(context: ServerContext, ids: Sequence[str], caller: Caller) -> dict[str, InputItem]:
    """The items of these ids, which the `item_reference`s of an input name; ids that are not known are left out."""
    return {}


async def keep(context: ServerContext, body: ResponsesRequest, owner: str, response: Response) -> None:
    """Keep a response that has ended: completed, incomplete or failed.

    `items.shown_input(body.input, response.id)` are the items of its own input; references in it are resolved already.
    """
