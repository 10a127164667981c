"""One response in its conversation, and what is kept of it: begun before its generation, kept at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import structlog
from msgspec import Raw

from eventlm.engine.object_store.actions import (
    ChangeObject,
    DuplicateItemError,
    ObjectTooLargeError,
    StoredItem,
    UnknownObjectError,
)
from eventlm.errors import EventLMError
from eventlm.server.api import Caller
from eventlm.server.context import ServerContext
from eventlm.server.responses.history import (
    duplicate_item,
    earlier_items,
    hold_conversation,
    too_large_to_keep,
)
from eventlm.server.responses.items import input_items, shown_input
from eventlm.server.responses.protocol import InputItem, ResponsesRequest
from eventlm.server.responses.replies import Response
from eventlm.server.responses.stored import CONVERSATION, RESPONSE, StoredResponse, stored_items

_log = structlog.get_logger("eventlm.server")
_encode = msgspec.json.Encoder().encode


class Turn:
    """A response in its conversation. `begin`, then `keep` when it has ended, and `end` in any case.

    earlier: the items before the body's own. Until the end no other turn of the conversation begins.
    """

    def __init__(self, context: ServerContext, body: ResponsesRequest, owner: str) -> None:
        self.earlier: list[InputItem] = []
        self._objects = context.engine.objects
        self._body = body
        self._owner = owner
        #: What this process holds, by kind and id.
        self._held: list[tuple[str, str]] = []

    @classmethod
    async def begin(cls, context: ServerContext, body: ResponsesRequest, caller: Caller) -> Turn:
        """Find the earlier items. Raises InputError or ApiError."""
        turn = cls(context, body, caller.principal.owner)
        conversation = body.conversation_id
        if conversation is not None and body.previous_response_id is None:
            await hold_conversation(context, conversation, turn._owner)
            turn._held.append((CONVERSATION, conversation))
        try:
            turn.earlier = await earlier_items(context, body, caller)
        except BaseException:
            await turn.end()
            raise
        return turn

    def check(self) -> None:
        """Raise ApiError if an item of the body, whose references are resolved, is there twice."""
        seen = {item.id for item in self.earlier}
        for item in input_items(self._body.input):
            # Those without one get one.
            if item.id and item.id in seen:
                raise duplicate_item(item.id)
            seen.add(item.id)

    async def begin_to_keep(self, response: Response) -> None:
        """Keep a response that goes on. It is lost with this process. Raises ApiError or ObjectStoreError."""
        data = self._data(response, shown_input(self._body.input, response.id))
        with _client_errors():
            await self._objects.put(RESPONSE, response.id, self._owner, data, hold=True)
        self._held.append((RESPONSE, response.id))

    async def keep(self, response: Response) -> None:
        """Keep a response that has ended, and append its items to the conversation, in one step.

        Raises ApiError or ObjectStoreError.
        """
        own = shown_input(self._body.input, response.id)
        data, items = self._data(response, own), stored_items([*own, *response.output])
        append = None
        if (conversation := self._body.conversation_id) is not None:
            if response.status in ("completed", "incomplete"):
                append = ChangeObject(kind=CONVERSATION, id=conversation, owner=self._owner, items=items)
            # They are found there.
            items = []
        with _client_errors():
            await self._keep(response.id, data, items, append)

    async def _keep(self, id: str, data: bytes, items: list[StoredItem], append: ChangeObject | None) -> None:
        """Both or neither: a response that ended well is in its conversation."""
        if (RESPONSE, id) in self._held:
            with contextlib.suppress(UnknownObjectError):
                await self._objects.change(RESPONSE, id, self._owner, data, items, also=append)
                return
            # It was deleted.
        elif self._body.store is not False:
            await self._objects.put(RESPONSE, id, self._owner, data, items, also=append)
            return
        if append is not None:
            await self._objects.change(append.kind, append.id, append.owner, items=append.items)

    async def end(self) -> None:
        """Let others go on. Harmless when called twice."""
        while self._held:
            kind, id = self._held.pop()
            try:
                await self._objects.change(kind, id, self._owner, hold=False)
            except UnknownObjectError:
                pass
            except EventLMError as error:
                _log.warning("what a response held could not be released", kind=kind, error=str(error))

    def _data(self, response: Response, own: list[InputItem]) -> bytes:
        return StoredResponse(Raw(_encode(response)), [*self.earlier, *own]).encode()


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    """Raise ApiError for what a client has to change. What was deleted meanwhile is no error."""
    try:
        yield
    except UnknownObjectError:
        pass
    except DuplicateItemError as error:
        raise duplicate_item(str(error)) from error
    except ObjectTooLargeError as error:
        raise too_large_to_keep(error) from error
