"""What is kept of a response, and what is shown of it later."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw

from eventlm.engine.object_store.actions import StoredItem, StoredObject
from eventlm.engine.request_registry import ReplyStatus, SampleState, SampleStatus
from eventlm.server.responses.protocol import InputItem, InputPart
from eventlm.server.responses.stored import LOST, StoredResponse, present_reply, stored_items

QUEUED = b'{"id":"resp_1","status":"queued","background":true,"output":[],"error":null}'
ITEM = InputItem(type="message", id="msg_1", role="user", content=[InputPart(type="input_text", text="hi")])


def found(reply: bytes, *, is_held: bool = True) -> StoredObject:
    return StoredObject(StoredResponse(Raw(reply), [ITEM]).encode(), is_held)


def status(*states: SampleState) -> ReplyStatus:
    return ReplyStatus(
        reply_id="resp_1",
        samples=[
            SampleStatus(request=1, index=index, state=state, output_tokens=0) for index, state in enumerate(states)
        ],
    )


def test_a_response_is_kept_byte_for_byte() -> None:
    output = b'{"id":"msg_2","type":"message","role":"assistant","content":[{"type":"output_text","text":"Hi"}]}'
    reply = b'{"id":"resp_1","status":"completed","unknown":[1.50],"output":[' + output + b"]}"
    stored = StoredResponse.decode(found(reply).data)
    assert bytes(stored.reply) == reply
    assert stored.input == [ITEM]
    assert [item.id for item in stored.all_items] == ["msg_1", "msg_2"]
    assert not stored.head.goes_on
    assert not stored.head.background
    assert bytes(present_reply(found(reply), None)) == reply
    assert bytes(present_reply(found(reply, is_held=False), None)) == reply


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (None, "in_progress"),
        (status("waiting"), "queued"),
        (status("running"), "in_progress"),
        (status("preempted"), "in_progress"),
        (status("ending"), "in_progress"),
        (status("waiting", "running"), "in_progress"),
    ],
)
def test_one_that_goes_on_waits_or_does_not(states: ReplyStatus | None, shown: str) -> None:
    assert present_reply(found(QUEUED), states) == msgspec.json.decode(QUEUED) | {"status": shown}


def test_one_that_nobody_works_on_has_failed() -> None:
    shown = present_reply(found(QUEUED, is_held=False), status("waiting"))
    assert shown == msgspec.json.decode(QUEUED) | {"status": "failed", "error": LOST}


def test_items_are_kept_by_their_ids() -> None:
    [stored] = stored_items([ITEM])
    assert stored == StoredItem("msg_1", msgspec.json.encode(ITEM))
    with pytest.raises(msgspec.ValidationError, match="id"):
        stored_items([InputItem(type="message")])
