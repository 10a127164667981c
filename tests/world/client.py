"""The clients of a world: each comes once, and knows what it must be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tests.serving import fake_text
from tests.world.checks import Checks
from tests.world.http_client import Reply, send
from tests.world.network import Address
from tests.world.plan import Visit
from tests.world.process import Process
from tests.world.world import World

#: The whole text of a choice by its index, of a request's body, and the reasons for which it may end.
Answer = Callable[[dict[str, Any], int], tuple[str, set[str]]]


def most_tokens(body: dict[str, Any]) -> int:
    """The limit of a request's output."""
    return int(body.get("max_tokens") or body["max_completion_tokens"])


def fake_answer(body: dict[str, Any], index: int) -> tuple[str, set[str]]:
    """Of the fake model."""
    reference = fake_text(body["seed"], most_tokens(body), index=index)
    stop = body.get("stop", "")
    wanted = reference.partition(stop)[0] if stop else reference
    return wanted, {"length" if wanted == reference else "stop"}


class Client:
    """A visit under way, in a process of its own. answer: what it should get. has_left: it ended its connection before
    the reply's end; has_lost_server: that has died, or was not there. on_shown: called whenever something of a reply
    has come. num_told_before, came_in_outage: what the recorder had told when it came.
    """

    def __init__(self, world: World, visit: Visit, address: Address, answer: Answer = fake_answer) -> None:
        self._answer = answer
        self.visit = visit
        self.reply = Reply()
        self.has_left = False
        self.has_lost_server = False
        self.on_shown: Callable[[Client], None] | None = None
        self.num_told_before, self.came_in_outage = 0, False
        self.was_cut = False
        self.is_over = False
        self._num_seen = 0
        self.process = Process(world, f"client {visit.number}")
        self.process.run(self._visit(address))

    async def _visit(self, address: Address) -> int:
        visit = self.visit
        self.reply.on_data = self._see
        self._note(f"sends POST {visit.path} {msgspec.json.encode(visit.body).decode()}")
        await send(self.process, address, "POST", visit.path, visit.body, reply=self.reply)
        self._note(
            f"has a whole reply of status {self.reply.status}" if self.reply.is_whole else f"{self.reply.error!r}"
        )
        self.is_over = True
        return 0

    def _note(self, what: str) -> None:
        self.process.world.note(self.process.name, what)

    def _see(self) -> None:
        """Something has come of the reply."""
        if self.on_shown is not None:
            self.on_shown(self)
        body = self.reply.body
        if self.process.world.notes is not None:
            self._note(f"gets {bytes(body[self._num_seen :])!r} of status {self.reply.status}")
            self._num_seen = len(body)
        if 0 <= self.visit.leaves_after <= body.count(b"\n\n") and not self.reply.is_whole:
            self._note("leaves")
            self.has_left = self.is_over = True
            self.process.end(0)

    def cut(self) -> None:
        """Its connection breaks."""
        sockets = [*self.process.handles.values()]
        for each in sockets:
            each.abort()  # type: ignore[attr-defined]
        self.was_cut = bool(sockets)

    @property
    def was_disturbed(self) -> bool:
        """Whether it need not have been served whole."""
        return self.has_left or self.was_cut or self.reply.was_orphaned or self.has_lost_server

    @property
    def is_gone(self) -> bool:
        """Whether its connection has ended."""
        return self.is_over or self.was_cut

    @property
    def was_dropped(self) -> bool:
        """Whether it was told that its deadline could not be met, where it had asked for that."""
        return "drop_if_late" in self.visit.body and b'"deadline_exceeded"' in self.reply.body

    def _choices(self) -> list[dict[str, Any]]:
        """All that has come of them."""
        reply = self.reply
        if reply.status != 200:
            return []
        if self.visit.body["stream"]:
            return [choice for event in reply.events() for choice in event.get("choices", ())]
        return msgspec.json.decode(bytes(reply.body))["choices"] if reply.is_whole else []

    def shown(self) -> dict[int, tuple[int, bool]]:
        """Of each choice the tokens that have come, and whether it has ended."""
        found: dict[int, tuple[int, bool]] = {}
        for choice in self._choices():
            num_tokens, has_ended = found.get(choice["index"], (0, False))
            text = _text_of(choice, is_stream=self.visit.body["stream"]).rstrip("\N{REPLACEMENT CHARACTER}")
            found[choice["index"]] = num_tokens + len(text.encode()), has_ended or bool(choice["finish_reason"])
        return found

    def check(self, checks: Checks) -> None:
        """What it was told is right as far as it goes, and whole unless it was told why."""
        reply, visit = self.reply, self.visit
        where = f"visit {visit.number}"
        if self.was_disturbed and not reply.status:
            return
        checks.check("answered", bool(reply.status) or self.was_disturbed, f"{where}: {reply.error!r}")
        is_ended = b"ended this request before it was complete" in reply.body
        checks.check("nobody is ended for another", not is_ended or self.was_disturbed, where)
        if reply.status != 200:
            checks.check("refusals have a reason", self._error(bytes(reply.body)), f"{where}: {bytes(reply.body)!r}")
            return
        if not visit.body["stream"]:
            if reply.is_whole:
                self._check_choices(checks, self._choices(), is_stream=False)
            return
        events = reply.events()
        told = [event["error"] for event in events if "error" in event]
        self._check_choices(checks, self._choices(), is_stream=True, is_cut=bool(told) or not reply.is_done)
        if not self.was_disturbed:
            checks.check("streams end", reply.is_done or bool(told), f"{where} ended after {len(events)} events")

    @staticmethod
    def _error(body: bytes) -> bool:
        try:
            return bool(msgspec.json.decode(body)["error"]["message"])
        except (msgspec.DecodeError, KeyError):
            return False

    def _check_choices(
        self, checks: Checks, choices: list[dict[str, Any]], *, is_stream: bool, is_cut: bool = False
    ) -> None:
        body, where = self.visit.body, f"visit {self.visit.number}"
        for index in range(body["n"]):
            own = [choice for choice in choices if choice["index"] == index]
            ends = [choice["finish_reason"] for choice in own if choice["finish_reason"]]
            checks.check("one finish a choice", len(ends) <= 1, f"{where}: {ends}")
            text = "".join(_text_of(choice, is_stream=is_stream) for choice in own)
            wanted, reasons = self._answer(body, index)
            if ends in (["length"], ["stop"]):
                checks.check("texts end for the right reason", ends[0] in reasons, f"{where}.{index}: {ends}")
                checks.check("whole texts are the reference's", text == wanted, f"{where}.{index}: {text!r}")
            else:
                checks.check(
                    "cut texts begin the reference's",
                    wanted.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}")),
                    f"{where}.{index}: {text!r}",
                )
                checks.check("texts are cut for a reason", bool(ends) or is_cut, f"{where}.{index} has no end")


def _text_of(choice: dict[str, Any], *, is_stream: bool) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice["delta"] if is_stream else choice["message"]).get("content") or "")
