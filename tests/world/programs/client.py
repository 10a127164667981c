"""The clients of a world. `tests.world.invariants.told` checks what they receive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from eventlm.config import ServerConfig
from eventlm.engine.request_registry import RUN_ON_SECONDS
from tests.serving import fake_text
from tests.world.machine.network import Address
from tests.world.machine.process import Process
from tests.world.machine.world import SECOND, World
from tests.world.plans.plan import Visit
from tests.world.programs.http_client import Reply, send

#: Given a request's body and the index of a choice, returns the choice's full text and its allowed finish reasons.
Answer = Callable[[dict[str, Any], int], tuple[str, set[str]]]
#: A client reconnects after this time, or, one time in four, within twice the time for which replies are kept.
_PAUSE_MS = (1, 5_000)


def most_tokens(body: dict[str, Any]) -> int:
    """The most tokens that a request may generate."""
    return int(body.get("max_tokens") or body["max_completion_tokens"])


def fake_answer(body: dict[str, Any], index: int) -> tuple[str, set[str]]:
    """The answer of the fake model."""
    reference = fake_text(body["seed"], most_tokens(body), index=index)
    stop = body.get("stop", "")
    wanted = reference.partition(stop)[0] if stop else reference
    return wanted, {"length" if wanted == reference else "stop"}


class Client:
    """A visit in progress, in its own process. config: the server's. answer: gives what the client should receive.

    replies: all replies, in order. stream_replies: those that are parts of one stream. ended: the reply to its DELETE.
    has_left: it closed its connection before the reply's end. was_late: it came back when its reply no longer had to be
    kept. has_lost_server: the server has died, or was not there, and its reply may be lost. num_outages: how many
    servers have died that others must go on from; it then tries until one is there. was_rewound: a power failure may
    have taken what it has seen from the log. on_shown: called whenever part of a reply arrives.
    num_told_before, came_in_outage: what the recorder had reported when the client came, or one with the same
    idempotency key. same: all clients with that key that have come, and itself. edge_lost_ns: when a front end last
    died.
    """

    def __init__(
        self, world: World, visit: Visit, address: Address, config: ServerConfig, answer: Answer = fake_answer
    ) -> None:
        self.visit = visit
        self.answer = answer
        self.replies: list[Reply] = []
        self.ended: Reply | None = None
        self.stream_replies: list[Reply] = []
        self.has_left = False
        self.was_late = False
        self.has_lost_server = False
        self.num_outages = 0
        self.was_rewound = False
        #: Of the reply that was deleted for it.
        self.deleted_id = ""
        #: When the last of these had gone on.
        self._found_ns = 0
        self.on_shown: Callable[[Client], None] | None = None
        self.num_told_before, self.came_in_outage = 0, False
        self.is_over = False
        self.same = [self]
        self.came_ns = world.now_ns
        self.edge_lost_ns: Callable[[], int] = lambda: -1
        self._world = world
        self._address = address
        self._config = config
        self._num_seen = 0
        self._num_pauses = 0
        self._ending: asyncio.Task[None] | None = None
        self.process = Process(world, f"client {visit.number}")
        self.process.run(self._visit())

    @property
    def reply(self) -> Reply:
        """The last reply; an empty one if no request has been sent yet."""
        return self.replies[-1] if self.replies else Reply()

    @property
    def was_disturbed(self) -> bool:
        """Whether the client need not have received a complete reply."""
        reply, visit = self.reply, self.visit
        has_dawdled = visit.pauses_after >= 0 and visit.pause_ms >= self._config.write_timeout_seconds * 1000
        is_lost = reply.was_cut or reply.was_orphaned or (has_dawdled and not reply.is_whole)
        return self.has_left or self.was_late or self.has_lost_server or self.ended is not None or is_lost

    @property
    def keep_ns(self) -> int:
        """How long its request may go on without it."""
        if self.visit.idempotency_key:
            return (self._config.resume_seconds or RUN_ON_SECONDS) * SECOND
        return self._config.resume_seconds * SECOND if self.visit.body["stream"] else 0

    @property
    def has_lost_edge(self) -> bool:
        """Whether a process that had begun to serve it has died. With a key, any may have."""
        if self.visit.idempotency_key and self.edge_lost_ns() >= min(each.came_ns for each in self.same):
            return True
        servers = [reply.server for reply in self.replies]
        return any(server is not None and server.is_dead for server in servers)

    @property
    def was_dropped(self) -> bool:
        """Whether it asked to be dropped if late, and was told that its deadline could not be met."""
        return "drop_if_late" in self.visit.body and b'"deadline_exceeded"' in self.reply.body

    @property
    def was_refused(self) -> bool:
        """Whether it was told that its key is wrong or over a limit."""
        key = self.visit.key
        if key is None:
            return False
        return self.reply.status == 401 if key.holder is None else self.reply.status == 429 and bool(key.holder.limits)

    @property
    def _key_headers(self) -> dict[str, str]:
        return {} if self.visit.key is None else self.visit.key.headers

    def choices(self) -> list[dict[str, Any]]:
        """All choices, or parts of choices, that have arrived."""
        if self.visit.body["stream"]:
            events = [event for reply in self.stream_replies for event in reply.sent()]
            return [choice for event in events if event.data is not None for choice in event.data.get("choices", ())]
        reply = self.reply
        is_there = reply.is_whole and reply.status == 200
        return msgspec.json.decode(bytes(reply.body))["choices"] if is_there else []

    def shown(self) -> dict[int, tuple[int, bool]]:
        """For each choice, the tokens that have arrived and whether it has ended."""
        found: dict[int, tuple[int, bool]] = {}
        for choice in self.choices():
            num_tokens, has_ended = found.get(choice["index"], (0, False))
            text = text_of(choice).rstrip("\N{REPLACEMENT CHARACTER}")
            found[choice["index"]] = num_tokens + len(text.encode()), has_ended or bool(choice["finish_reason"])
        return found

    def lose_server(self, *, goes_on: bool) -> bool:
        """Its server has died. goes_on: the next one must go on with replies. Returns whether its own is one of them:
        it has seen an event of it, and it may still be kept.
        """
        is_kept = goes_on and self.visit.body["stream"] and bool(self._position()[1]) and not self._is_late()
        if is_kept:
            self.num_outages += 1
        else:
            self.has_lost_server = True
        return is_kept

    def find_server(self, *, has_gone_on: bool) -> None:
        """There is a server again. has_gone_on: it has gone on where the last one had died."""
        self._found_ns = self._world.now_ns
        self.has_lost_server = self.has_lost_server or not has_gone_on

    def _is_late(self) -> bool:
        """Whether its reply need not be kept any more."""
        lost_ns = max((each.last_ns for each in self.stream_replies if each.status == 200), default=0)
        if self.reply.is_under_way:
            return False
        return self._world.now_ns - max(lost_ns, self._found_ns) >= self.keep_ns

    @property
    def _has_found_nobody(self) -> bool:
        """Whether it must try again, because its server has died."""
        return bool(self.num_outages) and self.reply.status in (0, 503) and not self.reply.was_cut

    async def _visit(self) -> int:
        visit = self.visit
        if visit.patience_us >= 0:
            self.process.loop.call_later(visit.patience_us / 1e6, self._leave)
        num_left = visit.num_tries
        await self._ask("POST", visit.path)
        while num_left:
            if (self.reply.is_whole and self.reply.status < 500) or (self.reply.sent() and not visit.idempotency_key):
                break
            await self._pause()
            await self._ask("POST", visit.path)
            num_left -= not self._has_found_nobody
        num_left = visit.num_tries
        while num_left:
            reply_id, last = self._position()
            if visit.idempotency_key or not last or self.is_served or self.reply.status == 404:
                break
            await self._pause()
            self.was_late = self._is_late()
            await self._ask("GET", f"/v1/stream/{reply_id}", {"last-event-id": last})
            if self.reply.status == 200:
                self.was_late = False
            elif self.reply.is_whole:
                # It may have waited until a server could answer.
                self.was_late = self._is_late()
            num_left -= not self._has_found_nobody
        if self._ending is not None:
            await self._ending
        self.is_over = True
        return 0

    async def _ask(self, method: str, path: str, headers: dict[str, str] | None = None) -> None:
        """Send a request and read its reply."""
        self._num_seen = 0
        reply = Reply()
        self.replies.append(reply)
        self.stream_replies = [*self.stream_replies, reply] if method == "GET" else [reply]
        reply.on_data = self._see
        body = self.visit.body if method == "POST" else None
        headers = (headers or {}) | self._key_headers
        if method == "POST" and self.visit.idempotency_key:
            headers["idempotency-key"] = self.visit.idempotency_key
        self._note(f"sends {method} {path} {headers} {msgspec.json.encode(body).decode()}")
        await send(self.process, self._address, method, path, body, headers, reply=reply)
        self._note(f"has a whole reply of status {reply.status}" if reply.is_whole else f"{reply.error!r}")

    @property
    def is_served(self) -> bool:
        """Whether it has received the end of its stream, or an error."""
        return self.reply.is_done or any("error" in (event.data or ()) for event in self.reply.sent())

    def _position(self) -> tuple[str, str]:
        """The id of its reply and that of its last event; empty if there are no ids."""
        sent = [event for reply in self.stream_replies for event in reply.sent()]
        ids = [event.id for event in sent if event.id]
        names = [str(event.data["id"]) for event in sent if event.data is not None and "id" in event.data]
        return (names[-1], ids[-1]) if names and ids else ("", "")

    async def _pause(self) -> None:
        number = self._num_pauses
        self._num_pauses += 1
        draws, visit = self._world.draws, self.visit
        most_ms = 2000 * self._config.resume_seconds
        is_long = not self._has_found_nobody and draws.draw("long pause", visit.number, number) % 4 == 0
        least_ms, most_ms = (1, max(most_ms, 1)) if is_long else _PAUSE_MS
        await asyncio.sleep(draws.between(least_ms, most_ms, "pause", visit.number, number) / 1000)

    def _note(self, what: str) -> None:
        self._world.note(self.process.name, what)

    def _see(self) -> None:
        """Part of a reply has arrived."""
        visit, reply = self.visit, self.reply
        if self.on_shown is not None:
            self.on_shown(self)
        if self._world.notes is not None:
            self._note(f"gets {bytes(reply.body[self._num_seen :])!r} of status {reply.status}")
            self._num_seen = len(reply.body)
        if not reply.has_paused:
            reply.last_ns = self._world.now_ns
        if reply.is_whole:
            return
        num_events = reply.body.count(b"\n\n")
        if 0 <= visit.leaves_after <= num_events:
            self._leave()
        elif 0 <= visit.deletes_after <= num_events and self._ending is None:
            self._ending = self.process.loop.create_task(self._end_reply())
        elif 0 <= visit.breaks_after <= num_events:
            self._note("loses its connection")
            self.cut()
        elif 0 <= visit.pauses_after <= num_events and not reply.has_paused:
            self._note(f"reads nothing for {visit.pause_ms} ms")
            reply.pause(visit.pause_ms / 1000)

    def _leave(self) -> None:
        self._note("leaves")
        self.has_left = self.is_over = True
        self.process.end(0)

    async def _end_reply(self) -> None:
        """DELETE its reply, over another connection, and perhaps once more, as if it had not received the answer."""
        reply_id, _ = self._position()
        if reply_id:
            self.ended = Reply()
            await self._delete(reply_id, self.ended)
            if self.ended.is_whole and self.ended.status == 200:
                self.deleted_id = reply_id
            if self._world.draws.draw("deletes again", self.visit.number) % 2:
                await self._delete(reply_id, Reply())

    async def _delete(self, reply_id: str, reply: Reply) -> None:
        path = f"/v1/stream/{reply_id}"
        await send(self.process, self._address, "DELETE", path, headers=self._key_headers, reply=reply)
        self._note(f"has ended its reply: {reply.status} {bytes(reply.body)!r}")

    def cut(self) -> None:
        """Break its connections."""
        for reply in (self.reply, self.ended):
            if reply is not None and reply.socket is not None and not reply.is_whole:
                reply.cut()


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, or of a part of one."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice.get("message") or {}).get("content") or "")
