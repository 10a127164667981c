"""Requests with an idempotency key: one execution a key, and all who join it get the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from eventlm.events import Admitted, Arrived, Event, Finished
from tests.world.invariants.checks import Checks
from tests.world.machine.world import SECOND

if TYPE_CHECKING:
    from tests.world.plans.plan import Visit
    from tests.world.programs.client import Client

_GOOD = ("eos", "stop_token", "grammar", "stop", "tool_calls", "length")


class Executions:
    """Follows the events of one engine. visits: all of the plan. keep_seconds: how long a reply is kept at least. Its
    first client may leave at once, so that is counted from its beginning.

    A key is free once an execution has failed. One that nobody waits for any more may still have to be cancelled while
    the next one begins, but must not reach a good end.
    """

    def __init__(self, visits: Iterable[Visit], keep_seconds: int) -> None:
        self._keep_ns = keep_seconds * SECOND
        #: Of requests with a key that nobody ends, by their seeds, which differ.
        self._seeds = {str(each.body["seed"]): each.number for each in visits if each.idempotency_key}
        for each in visits:
            if each.deletes_after >= 0:
                self._seeds.pop(str(each.body["seed"]), None)
        #: The seeds of requests.
        self._requests: dict[int, str] = {}
        #: The last execution of each seed that has not failed, and when it began.
        self._last: dict[str, tuple[int, int]] = {}
        #: Executions that have ended well.
        self._ended: set[int] = set()
        #: Executions that another one has followed although they had not ended.
        self._followed: set[int] = set()

    def see(self, event: Event) -> str:
        """Take the next event. Returns what is wrong with it, or nothing."""
        if isinstance(event, Arrived) and event.seed in self._seeds:
            self._requests[event.s] = event.seed
        elif isinstance(event, Admitted) and event.request in self._requests:
            return self._begin(event)
        elif isinstance(event, Finished) and event.request in self._requests:
            return self._end(event)
        return ""

    def go_on(self, first_s: int) -> None:
        """Another engine goes on with the run, from this event on: what came after it has not happened."""
        self._requests = {each: seed for each, seed in self._requests.items() if each < first_s}
        self._last = {seed: each for seed, each in self._last.items() if each[0] < first_s}
        self._ended = {each for each in self._ended if each < first_s}

    def _begin(self, event: Admitted) -> str:
        seed = self._requests[event.request]
        before = self._last.get(seed)
        self._last[seed] = (event.request, event.ts)
        if before is None:
            return ""
        last, begun_ns = before
        if last not in self._ended:
            self._followed.add(last)
        elif event.ts < begun_ns + self._keep_ns:
            return f"visit {self._seeds[seed]}: request {last} has ended well, and request {event.request} runs"
        return ""

    def _end(self, event: Finished) -> str:
        seed, request = self._requests[event.request], event.request
        if event.reason not in _GOOD:
            self._followed.discard(request)
            if seed in self._last and self._last[seed][0] == request:
                del self._last[seed]
            # Its other choices may end well.
            del self._requests[request]
        elif request in self._followed:
            return f"visit {self._seeds[seed]}: request {request} went on beside the next one"
        else:
            self._ended.add(request)
        return ""


class Joins:
    """What clients with the same idempotency key have received."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        #: Whole replies, and events by their ids, by the ids of replies.
        self._whole: dict[str, bytes] = {}
        self._events: defaultdict[str, dict[str, object]] = defaultdict(dict)

    def check_client(self, client: Client) -> None:
        """Check that a client has received the same as those before it, as far as its replies are the same."""
        if not client.visit.idempotency_key:
            return
        where = f"visit {client.visit.number}"
        for reply in client.replies:
            if reply.status != 200:
                continue
            if client.visit.body["stream"]:
                self._check_events(where, reply.sent())
            elif reply.is_whole:
                body = bytes(reply.body)
                first = self._whole.setdefault(msgspec.json.decode(body)["id"], body)
                self._checks.check("joined replies are the same", body == first, f"{where}: {body!r}, {first!r}")

    def _check_events(self, where: str, sent: Sequence[tuple[str, dict[str, object] | None]]) -> None:
        names = [str(data["id"]) for _, data in sent if data is not None and "id" in data]
        for event_id, data in sent:
            if event_id and names:
                first = self._events[names[0]].setdefault(event_id, data)
                self._checks.check("joined replies are the same", data == first, f"{where}: {data}, {first}")
