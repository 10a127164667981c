"""What is kept of responses and conversations, in the engine's object store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from eventlm.engine.object_store.actions import StoredItem, StoredObject
from eventlm.engine.request_registry import ReplyStatus
from eventlm.server.responses.protocol import InputItem
from eventlm.server.responses.replies import ResponseError

#: The kinds of kept objects, and how their ids begin.
RESPONSE, CONVERSATION = "response", "conversation"
CONVERSATION_PREFIX = "conv_"
#: Statuses of responses that go on.
GOING_ON = ("queued", "in_progress")
#: Of a response whose end was not kept.
LOST = {
    "code": "server_error",
    "message": "The process that generated this response has ended, or could not store its end; send it again.",
}

_encode = msgspec.json.Encoder().encode


class StoredResponse(Struct, frozen=True, array_like=True):
    """A kept response. reply: as it is shown. input: the items that the model was given, earlier ones included."""

    reply: Raw
    input: list[InputItem]

    @classmethod
    def decode(cls, data: bytes) -> StoredResponse:
        """From the bytes of a kept object."""
        return _decode(data)

    def encode(self) -> bytes:
        """As the bytes of a kept object."""
        return _encode(self)

    @property
    def head(self) -> ReplyHead:
        """What decides how it is treated."""
        return _decode_head(self.reply)

    @property
    def all_items(self) -> list[InputItem]:
        """Its input and its output."""
        return [*self.input, *_decode_output(self.reply).output]


class ReplyHead(Struct, frozen=True):
    """A few fields of a response."""

    status: str
    background: bool | None = None
    error: ResponseError | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended."""
        return self.status in GOING_ON


class _Output(Struct, frozen=True):
    output: list[InputItem]


class _Item(Struct, frozen=True):
    id: str


_decode = msgspec.json.Decoder(StoredResponse).decode
_decode_head = msgspec.json.Decoder(ReplyHead).decode
_decode_output = msgspec.json.Decoder(_Output).decode
_decode_item = msgspec.json.Decoder(_Item).decode


class StoredConversation(Struct, frozen=True, kw_only=True):
    """A kept conversation, and the reply of `/v1/conversations`. Its items are those of the kept object."""

    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, str] = {}


def stored_items(items: Iterable[Any]) -> list[StoredItem]:
    """Items as the object store has them. Each has an id."""
    return [StoredItem(_decode_item(data).id, data) for data in map(_encode, items)]


def present_reply(found: StoredObject, status: ReplyStatus | None) -> Any:
    """A kept response as it is now, for JSON. status: where its sequences are, if that is known."""
    stored = StoredResponse.decode(found.data)
    if not stored.head.goes_on:
        return stored.reply
    reply: dict[str, Any] = msgspec.json.decode(stored.reply)
    if not found.is_held:
        return reply | {"status": "failed", "error": LOST}
    waits = status is not None and all(sample.state == "waiting" for sample in status.samples)
    return reply | {"status": "queued" if waits else "in_progress"}
