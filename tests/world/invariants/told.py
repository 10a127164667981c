"""What a client of a world must have received: the reference text, or its beginning and why there is no more."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from eventlm.server.stream_events import StreamPosition
from tests.world.invariants.checks import Checks
from tests.world.programs.client import Client, text_of
from tests.world.programs.http_client import Reply


def check_client(client: Client, checks: Checks) -> None:
    """Check everything that a client received."""
    reply, where = client.reply, f"visit {client.visit.number}"
    for each in client.replies:
        checks.check("answered", bool(each.status) or _may_fail(client, each), f"{where}: {each.error!r}")
        if each.is_whole and each.status != 200:
            checks.check("refusals have a reason", _has_reason(each), f"{where}: {each.status} {bytes(each.body)!r}")
        is_ended = b"ended this request before it was complete" in each.body
        is_lost = client.was_disturbed or client.has_lost_edge or any(other.ended is not None for other in client.same)
        checks.check("no request ends because of another", not is_ended or is_lost, where)
    if client.ended is not None:
        _check_end(client, client.ended, checks)
    if reply.status == 404 and len(client.stream_replies) > 1:
        is_gone = client.was_late or client.has_lost_server or client.ended is not None
        checks.check("replies are kept", is_gone, f"{where} came in time and found no reply")
    if client.visit.body["stream"]:
        _check_stream(client, checks)
    elif reply.is_whole and reply.status == 200:
        _check_choices(client, checks)


def _may_fail(client: Client, reply: Reply) -> bool:
    """Whether a connection may have ended without a reply."""
    return client.was_disturbed or reply.was_cut or reply.was_orphaned or bool(client.num_outages)


def _has_reason(reply: Reply) -> bool:
    try:
        return bool(msgspec.json.decode(bytes(reply.body))["error"]["message"])
    except (msgspec.DecodeError, KeyError):
        return False


def _check_end(client: Client, ended: Reply, checks: Checks) -> None:
    """Check that a client's DELETE was answered, and that its reply ended after that."""
    where = f"visit {client.visit.number}"
    checks.check("answered", bool(ended.status) or _may_fail(client, ended), f"{where}: DELETE: {ended.error!r}")
    if ended.is_whole:
        checks.check("replies can be ended", ended.status in (200, 404, 503), f"{where}: {ended.status}")
    is_there = not (client.reply.was_cut or client.reply.was_orphaned or client.has_left)
    if ended.is_whole and ended.status == 200 and is_there:
        # A client that reconnects after that finds no reply.
        is_told = client.is_served or client.reply.status == 404
        checks.check("readers of a deleted reply reach an end", is_told, f"{where} {bytes(client.reply.body)!r}")


def _check_stream(client: Client, checks: Checks) -> None:
    where, reply = f"visit {client.visit.number}", client.reply
    sent = [event for each in client.stream_replies for event in each.sent()]
    data = [event.data for event in sent if event.data is not None]
    ids = [_place(event.id) for event in sent if event.id]
    rising = all(before < after for before, after in pairwise(ids))
    checks.check("ids of events rise", rising, f"{where}: {[event.id for event in sent]}")
    nameless = [event for event in sent if not event.id and event.data is not None and "error" not in event.data]
    checks.check("all events have ids or none has", not ids or not nameless, f"{where}: {nameless}")
    told = any("error" in event for event in data)
    _check_choices(client, checks, is_cut=told or not reply.is_done)
    if (sent or reply.status == 200) and not client.was_disturbed:
        is_told = told or (reply.is_whole and reply.status >= 400)
        name = "streams end" if len(client.stream_replies) == 1 else "resumed streams end"
        checks.check(name, reply.is_done or is_told, f"{where} ended after {len(sent)} events")
        if client.num_outages:
            checks.check("what was acknowledged outlives its engine", reply.is_done, f"{where}: {bytes(reply.body)!r}")


def _place(event_id: str) -> tuple[int, int, int]:
    """The position of an event in its stream, from its id."""
    position = StreamPosition.parse(event_id)
    if not position.skip:
        return position.end, 1, 0
    # Events after all outputs, or after some outputs that are not all shown yet.
    return position.end, 2 * (not position.size), position.skip


def _check_choices(client: Client, checks: Checks, *, is_cut: bool = False) -> None:
    body, where = client.visit.body, f"visit {client.visit.number}"
    for index in range(body["n"]):
        own = [choice for choice in client.choices() if choice["index"] == index]
        ends = [choice["finish_reason"] for choice in own if choice["finish_reason"]]
        checks.check("one finish a choice", len(ends) <= 1, f"{where}: {ends}")
        text = "".join(map(text_of, own))
        wanted, reasons = client.answer(body, index)
        if ends in (["length"], ["stop"]):
            checks.check("texts end for the right reason", ends[0] in reasons, f"{where}.{index}: {ends}")
            checks.check("whole texts are the reference's", text == wanted, f"{where}.{index}: {text!r}")
        else:
            # A possible beginning of the stop string is held back, and sent if something else ends the request.
            most = wanted + body.get("stop", "")[:-1]
            begins = most.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))
            checks.check("cut texts begin the reference's", begins, f"{where}.{index}: {text!r}")
            checks.check("texts are cut for a reason", bool(ends) or is_cut, f"{where}.{index} has no end")
