"""The attempts of a recorded run at other servers, each with its load and times: what models of them are fitted to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Struct

from eventlm.core.predictor import StepShape
from eventlm.events import (
    Arrived,
    BackendState,
    BackendUp,
    Event,
    Finished,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Gap,
    Streamed,
    Withdrawn,
)

#: A server that runs a smaller share of the most answers that it ever had under way at once is not full.
FULL_SHARE = 0.75


class AttemptName(NamedTuple):
    """An attempt: its sequence, and its number there."""

    request: int
    index: int  # type: ignore[assignment]  # hides tuple.index on purpose
    attempt: int


class RecordedForward(Struct, kw_only=True):
    """An attempt. replica, name, kind: of its server.

    all_tokens: of the prompt, and output that was shown before; prompt_tokens: without those that the server's cache is
    taken to hold. num_ahead: requests that the server had before it, of which `num_running` had begun their answers.
    sent_ns, first_ns, last_ns, ended_ns: when it was sent, when its first and its last tokens came, and when it ended
    by itself; -1: never. num_first, num_tokens: output tokens with the first ones, and with the last ones. running_ns:
    between these, the sum of the times of all answers that had begun there. entered_tokens: of prompts that were sent
    there meanwhile. told_tokens, told_cached: the server's own counts of the prompt; -1: it does not say. failure: why
    it failed, else None.
    """

    replica: int
    name: str
    kind: str
    all_tokens: int
    prompt_tokens: int
    num_ahead: int
    num_running: int
    sent_ns: int
    first_ns: int = -1
    last_ns: int = -1
    ended_ns: int = -1
    num_first: int = 0
    num_tokens: int = 0
    running_ns: int = 0
    entered_tokens: int = 0
    told_tokens: int = -1
    told_cached: int = -1
    failure: ForwardFailed | None = None

    @property
    def shape(self) -> StepShape:
        """What it found there, as if it were a step."""
        return StepShape(prefill_tokens=self.prompt_tokens, num_decodes=self.num_running)


class _Server:
    """A server as far as read. begun: of each of its attempts, the sums below when its answer began; None: it has not.
    running_ns: the sum of the times of all answers that had begun, up to `now_ns`. entered_tokens: of all prompts.
    """

    def __init__(self) -> None:
        self.name = self.kind = ""
        self.begun: dict[AttemptName, tuple[int, int] | None] = {}
        self.num_running = 0
        #: The most answers of ours that had begun at once: each had a slot.
        self.most_running = 0
        self.running_ns = 0
        self.entered_tokens = 0
        self.now_ns = 0
        #: How many it ran each time when it said that others waited.
        self.full: list[int] = []

    def advance(self, now_ns: int) -> None:
        """Add up to a time."""
        self.running_ns += self.num_running * (now_ns - self.now_ns)
        if now_ns > self.now_ns:
            # In one drain an answer may begin in the slot of one that has ended.
            self.most_running = max(self.most_running, self.num_running)
        self.now_ns = now_ns

    @property
    def slots(self) -> int:
        """Requests that it runs at once; 0: nothing is known of it.

        A request also waits for the step after its arrival. That can be told by how many answers went on at once at
        other times: far more than ran here. A few more only show that a full server, short of memory, runs now more,
        now fewer.
        """
        full = sorted(running for running in self.full if running >= FULL_SHARE * self.most_running)
        # Some may just be about to begin.
        return max(full[3 * len(full) // 4], self.most_running) if full else 0


class ForwardCollector:
    """Takes the events of a log in order. forwards: all attempts whose start is in it."""

    def __init__(self) -> None:
        self.forwards: list[RecordedForward] = []
        self._prompt_tokens: dict[int, int] = {}
        self._servers: dict[int, _Server] = {}
        self._under_way: dict[AttemptName, RecordedForward] = {}
        #: By sequence that was forwarded and has not ended, its output tokens.
        self._shown: dict[tuple[int, int], int] = {}
        self._attempts: dict[tuple[int, int], list[int]] = {}
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Arrived: self._arrived,
            BackendUp: self._backend_up,
            BackendState: self._backend_state,
            Forwarded: self._forwarded,
            Streamed: self._streamed,
            ForwardEnded: self._ended,
            ForwardFailed: self._failed,
            Withdrawn: self._withdrawn,
            Finished: self._finished,
            Gap: self._gap,
        }

    def apply(self, event: Event) -> None:
        """Take the next event."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    @property
    def slots(self) -> dict[int, int]:
        """By replica, how many requests its server runs at once, as far as it has told when others waited."""
        return {replica: server.slots for replica, server in self._servers.items() if server.slots}

    def _server(self, replica: int) -> _Server:
        return self._servers.setdefault(replica, _Server())

    def _arrived(self, event: Arrived) -> None:
        self._prompt_tokens[event.s] = event.prompt_tokens

    def _backend_up(self, event: BackendUp) -> None:
        server = self._server(event.replica)
        server.name, server.kind = event.name, event.kind

    def _backend_state(self, event: BackendState) -> None:
        if event.waiting > 0 and event.running > 0:
            self._server(event.replica).full.append(event.running)

    def _forwarded(self, event: Forwarded) -> None:
        num_prompt = self._prompt_tokens.get(event.request)
        if num_prompt is None:
            return
        name, server = AttemptName(event.request, event.index, event.attempt), self._server(event.replica)
        server.advance(event.ts)
        shown = self._shown.setdefault(name[:2], 0)
        found = RecordedForward(
            replica=event.replica,
            name=server.name,
            kind=server.kind,
            all_tokens=num_prompt + shown,
            prompt_tokens=max(num_prompt + shown - event.cached_tokens, 0),
            num_ahead=len(server.begun),
            num_running=server.num_running,
            sent_ns=event.ts,
        )
        server.begun[name] = None
        server.entered_tokens += found.prompt_tokens
        self.forwards.append(found)
        self._under_way[name] = found
        self._attempts.setdefault(name[:2], []).append(event.attempt)

    def _streamed(self, event: Streamed) -> None:
        for request, index, attempt, total in event.rows:
            name = AttemptName(request, index, attempt)
            found = self._under_way.get(name)
            if found is None:
                continue
            server = self._server(found.replica)
            server.advance(event.ts)
            began = server.begun[name]
            if began is None:
                began = server.begun[name] = server.running_ns, server.entered_tokens
                server.num_running += 1
                found.first_ns, found.num_first = event.ts, total
            found.running_ns, found.entered_tokens = server.running_ns - began[0], server.entered_tokens - began[1]
            found.last_ns, found.num_tokens = event.ts, total
            self._shown[request, index] = total

    def _ended(self, event: ForwardEnded) -> None:
        found = self._leave(AttemptName(event.request, event.index, event.attempt), event.ts)
        if found is not None:
            found.ended_ns, found.told_tokens, found.told_cached = event.ts, event.prompt_tokens, event.cached_tokens

    def _failed(self, event: ForwardFailed) -> None:
        found = self._leave(AttemptName(event.request, event.index, event.attempt), event.ts)
        if found is not None:
            found.ended_ns, found.failure = event.ts, event

    def _withdrawn(self, event: Withdrawn) -> None:
        self._leave(AttemptName(event.request, event.index, event.attempt), event.ts)

    def _finished(self, event: Finished) -> None:
        if self._shown.pop((event.request, event.index), None) is not None:
            sequence = event.request, event.index
            for attempt in self._attempts.pop(sequence, []):
                self._leave(AttemptName(*sequence, attempt), event.ts)

    def _gap(self, event: Gap) -> None:
        """What was under way may have ended in it."""
        for name in list(self._under_way):
            self._leave(name, event.ts)
        self._shown.clear()
        self._attempts.clear()

    def _leave(self, name: AttemptName, now_ns: int) -> RecordedForward | None:
        """An attempt is over."""
        found = self._under_way.pop(name, None)
        if found is not None:
            server = self._server(found.replica)
            server.advance(now_ns)
            server.num_running -= server.begun.pop(name) is not None
        return found
