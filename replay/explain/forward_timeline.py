"""The timeline of one sequence that is forwarded to other servers, as seen from here.

While an attempt is under way, its end shows what the time since the cursor was: until its first tokens, it waited for
the network, the server's queue and its prefill; then it was streamed; after the last tokens of one that failed, it was
lost. Of two attempts at once the time of the first one counts until the second was sent, if that was to answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, structs

from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import Sequence
from eventlm.events import Finished, Forwarded, ForwardEnded, ForwardFailed, Recovered, RetrySet, Withdrawn
from eventlm.replay.explain.life import Life
from eventlm.replay.explain.result import AttemptShare, Cause, Explanation
from eventlm.types import SequenceId


class _Attempt(Struct):
    """An attempt under way. first_ns, last_ns: of its tokens so far. num_before: tokens of the attempts before it."""

    number: int
    replica: int
    sent_ns: int
    is_hedge: bool
    cached_tokens: int
    running: int
    limit: int
    num_before: int
    num_tokens: int = 0
    first_ns: int | None = None
    last_ns: int = 0


class ForwardTimeline(Life):
    """names: of the servers that are known, by replica."""

    def __init__(self, sequence: Sequence, state: CoreState, names: Mapping[int, str]) -> None:
        super().__init__(sequence, state)
        self._names = names
        self._generates = sequence.arrival.scheduling.kind == "generate"
        self._live: dict[int, _Attempt] = {}

    def resume(self, sequence: Sequence, last_ns: int, state: CoreState) -> None:
        """After a gap of the log from `last_ns` until the state. When a second attempt was sent is not known there."""
        self.note_gap(sequence, last_ns, state.now_ns)
        self._live.clear()
        forwards = state.set_of(sequence).forwards
        attempts = None if forwards is None else forwards.attempts.get(sequence.id)
        if attempts is not None and attempts.current:
            self._resume(state, attempts.current, sequence.replica, attempts.sent_ns)
            if attempts.hedge:
                self._resume(state, attempts.hedge, attempts.hedge_replica, state.now_ns)
        if not self._live:
            self.phase = "retry" if sequence.residency else "queue"

    def _resume(self, state: CoreState, number: int, replica: int, sent_ns: int) -> None:
        num_before = self.sequence.num_output_tokens
        attempt = _Attempt(number, replica, sent_ns, False, 0, 0, 0, num_before)
        if num_before:
            # It may as well be the next attempt, without a token of its own.
            attempt.first_ns = attempt.last_ns = state.now_ns
        self.phase = "decode" if num_before else "prefill"
        self._live[number] = attempt

    def forward(self, decision: Forwarded) -> None:
        """A sequence has been sent to a server: this one, or another one."""
        identity = SequenceId(decision.request, decision.index)
        if identity != self.sequence.id:
            if not decision.hedge:
                self.note_admitted(decision.replica, [identity])
            return
        if not decision.hedge:
            self.close_wait(decision.ts)
            self.phase = "decode" if self.sequence.num_output_tokens else "prefill"
        self._live[decision.attempt] = _Attempt(
            decision.attempt,
            decision.replica,
            decision.ts,
            decision.hedge,
            decision.cached_tokens,
            decision.running,
            decision.limit,
            self.sequence.num_output_tokens,
        )

    def go_on(self, number: int, num_tokens: int, now_ns: int) -> None:
        """An attempt that counts has brought tokens, so many in all."""
        attempt = self._live[number]
        if attempt.first_ns is None:
            attempt.first_ns = now_ns
            self._emit(now_ns, attempt, "first_token")
            self.phase = "decode"
        attempt.last_ns = now_ns
        if self._generates:
            attempt.num_tokens = num_tokens - attempt.num_before
            if self.first_token_ns is None:
                self.first_token_ns = now_ns

    def end(self, fact: ForwardEnded) -> None:
        """An attempt has answered to the end."""
        attempt = self._live.get(fact.attempt)
        if attempt is None:
            return
        if fact.num_tokens > attempt.num_before or attempt.first_ns is not None:
            self.go_on(fact.attempt, fact.num_tokens, fact.ts)
        self._emit(fact.ts, attempt, "first_token" if attempt.first_ns is None else "streaming")
        self._close(attempt, fact.ts, "answered")

    def fail(self, fact: ForwardFailed) -> None:
        """An attempt has failed; another one may be under way."""
        attempt = self._live.get(fact.attempt)
        if attempt is None:
            return
        others = [each for each in self._live.values() if each is not attempt]
        if not others:
            if attempt.first_ns is not None:
                self._emit(attempt.last_ns, attempt, "streaming")
            self._emit(fact.ts, attempt, "failed_attempt")
        elif attempt.sent_ns < others[0].sent_ns:
            self._emit(others[0].sent_ns, attempt, "failed_attempt")
        self._close(attempt, fact.ts, fact.kind, status=fact.status, retry_after_ns=fact.retry_after_ns)

    def outlive(self, fact: Recovered) -> None:
        """The engine died, and its attempts with it; another one goes on."""
        died_ns = fact.ts - fact.down_ns
        for attempt in list(self._live.values()):
            if attempt.first_ns is not None:
                self._emit(attempt.last_ns, attempt, "streaming")
            self._emit(died_ns, attempt, "failed_attempt")
            self._close(attempt, fact.ts, "lost")
        self.note_outage(died_ns, fact.ts)

    def retry(self, decision: RetrySet) -> None:
        """It waits for its next attempt."""
        self.phase = "retry"
        self.attempts[-1] = structs.replace(self.attempts[-1], retry_ns=decision.due_ns)

    def withdraw(self, decision: Withdrawn) -> None:
        """Another attempt has answered first."""
        attempt = self._live[decision.attempt]
        for other in self._live.values():
            if other.sent_ns > attempt.sent_ns:
                self._emit(other.sent_ns, attempt, "outrun")
        self._close(attempt, decision.ts, "withdrawn")

    def settle(self, state: CoreState) -> None:
        """After a drain: if no server has it, note the reason."""
        self.urgency = self.sequence.urgency
        reason = self.watch.look(state, self.sequence)
        if reason is not None:
            self.go_on_waiting(state, reason)

    def finish(self, decision: Finished) -> Explanation:
        """It has ended."""
        return self._stop(decision.ts, decision.reason, decision.position, decision.cached_tokens)

    def cut(self, now_ns: int, outcome: str) -> Explanation:
        """The log has no more of it."""
        return self._stop(now_ns, outcome, self.sequence.num_output_tokens, self.sequence.cached_tokens)

    def _stop(self, now_ns: int, outcome: str, output_tokens: int, cached_tokens: int) -> Explanation:
        self.close_wait(now_ns)
        for attempt in list(self._live.values()):
            self._emit(now_ns, attempt, "cut_attempt" if attempt.first_ns is None else "streaming")
            self._close(attempt, now_ns, "cut")
        return self.explanation(outcome, output_tokens if self._generates else 0, cached_tokens)

    def _emit(self, end_ns: int, attempt: _Attempt, cause: Cause) -> None:
        self.emit(end_ns, self.phase, cause, replica=attempt.replica)

    def _close(self, attempt: _Attempt, now_ns: int, end: str, *, status: int = 0, retry_after_ns: int = 0) -> None:
        del self._live[attempt.number]
        self.attempts.append(
            AttemptShare(
                number=attempt.number,
                replica=attempt.replica,
                backend=self._names.get(attempt.replica, ""),
                sent_ns=attempt.sent_ns,
                ended_ns=now_ns,
                first_ns=attempt.first_ns,
                is_hedge=attempt.is_hedge,
                cached_tokens=attempt.cached_tokens,
                running=attempt.running,
                limit=attempt.limit,
                num_tokens=attempt.num_tokens,
                end=end,
                status=status,
                retry_after_ns=retry_after_ns,
            )
        )
