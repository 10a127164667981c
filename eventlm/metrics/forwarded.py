"""What the metrics store makes of sequences that are forwarded to other servers.

Such a sequence runs from its first attempt on, and waits between a failed attempt and the next one. Of two attempts
under way it runs where the first one went. Its prompt counts at its end, because only then the server may say how long
it was, and how much of it was in its cache; where it does not say, the core's own estimates count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eventlm.config.backends import BackendSpec
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import (
    BackendDown,
    BackendState,
    BackendUp,
    Event,
    Finished,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Relayed,
    RetrySet,
    Streamed,
    Withdrawn,
)
from eventlm.metrics.aggregates import BackendMetrics
from eventlm.metrics.live import LiveAttempt, LiveSequenceMetrics, Phase, observe_relayed
from eventlm.metrics.rows import MetricsSink, RelayedTokens
from eventlm.metrics.sequences import LiveSequences


class ForwardFold:
    """The part of the store for events of other servers."""

    def __init__(self, live: LiveSequences, sink: MetricsSink | None) -> None:
        self._live = live
        self._sink = sink
        #: Rows of the `streamed` fact whose `relay` is due.
        self._rows: list[tuple[int, int, int, int]] = []
        self.handlers: Mapping[type[Event], Callable[[Any], None]] = {
            BackendUp: self._up,
            BackendDown: self._down,
            BackendState: self._state,
            Forwarded: self._forwarded,
            Streamed: self._streamed,
            Relayed: self._relayed,
            ForwardEnded: self._ended,
            ForwardFailed: self._failed,
            RetrySet: self._retry,
            Withdrawn: self._withdrawn,
        }

    def begin(self, first: int, num_replicas: int, host: Mapping[str, Any]) -> None:
        """A replicaset whose replicas begin with number `first`. host: of the header, with the backends of the start,
        some of which may never be up. A what-if may have fewer.
        """
        for index, described in enumerate(host.get("backends", [])[:num_replicas], start=first):
            name, kind = BackendSpec(url=described["url"]).name, described.get("kind", "")
            self._live.replicas[index].metrics.backend = BackendMetrics(name=name, kind=kind)

    def take_up(self, taken: StateSnapshot) -> None:
        """Go on with the attempts that are under way in a snapshot."""
        for index, replica in enumerate(taken.replicas):
            if replica.capacity:
                backend = self._backend(index)
                backend.limit = replica.capacity.limit
                backend.reported_running = replica.capacity.running
                backend.reported_waiting = replica.capacity.waiting
                backend.reported_kv_ppm = replica.capacity.kv_used_ppm
        for each in (taken.forwards, *(other.forwards for other in taken.others or ())):
            for request, index, attempts in each.attempts if each else ():
                sequence = self._live.sequences[request, index]
                if attempts.current:
                    self._begin_attempt(sequence, attempts.current, sequence.replica, attempts.sent_ns)
                    sequence.attempts[attempts.current].has_answered = sequence.output_tokens > 0
                if attempts.hedge:
                    hedge = attempts.hedge, attempts.hedge_replica, attempts.hedge_sent_ns
                    self._begin_attempt(sequence, *hedge, is_hedge=True)

    def finish(self, sequence: LiveSequenceMetrics, event: Finished) -> int:
        """A sequence ends, and with it its attempts. Returns how much of its prompt its server's cache held."""
        sequence.end_attempts()
        request, prompt_tokens = sequence.request, sequence.prompt_tokens
        cached_tokens = sequence.reported_cached_tokens
        if cached_tokens is None:
            # The server's tokens may be others than ours.
            cached_tokens = event.cached_tokens * prompt_tokens // request.prompt_tokens
        cached_tokens = min(cached_tokens, prompt_tokens)
        if not request.is_branch and (sequence.last_token_ns is not None or event.reason == "complete"):
            metrics = self._live.replicas[sequence.counted_under].metrics
            for each in (metrics, self._backend(sequence.counted_under)):
                each.prompt_tokens += prompt_tokens
                each.cached_tokens += cached_tokens
            if not request.scheduling.skip_cache_read:
                metrics.queried_tokens += prompt_tokens
                metrics.hit_tokens += cached_tokens
        return cached_tokens

    def lose(self) -> None:
        """The engine died: its attempts are over, and no backend is known to be up."""
        for sequence in self._live.sequences.values():
            sequence.end_attempts()
        for index, replica in enumerate(self._live.replicas):
            if replica.core.forwards and replica.metrics.is_up:
                self._stop(index, "the engine died")

    def _backend(self, index: int) -> BackendMetrics:
        metrics = self._live.replicas[index].metrics
        if metrics.backend is None:
            # It came up before the beginning of the log.
            metrics.backend = BackendMetrics()
        return metrics.backend

    def _up(self, event: BackendUp) -> None:
        replica = self._live.replicas[event.replica]
        if event.epoch <= replica.epoch:
            return
        replica.epoch = event.epoch
        replica.metrics.is_up = True
        backend = replica.metrics.backend
        if backend is None or backend.name != event.name:
            # The replica stands for another one from now on.
            backend = replica.metrics.backend = BackendMetrics(name=event.name)
        backend.kind, backend.down_reason = event.kind, ""
        first = event.max_concurrency or (replica.core.forwards.first_limit if replica.core.forwards else 0)
        backend.limit = min(first, replica.core.max_num_seqs)
        backend.forget_reports()

    def _down(self, event: BackendDown) -> None:
        replica = self._live.replicas[event.replica]
        if event.epoch < replica.epoch:
            return
        replica.epoch = event.epoch
        self._stop(event.replica, event.reason)

    def _stop(self, index: int, reason: str) -> None:
        metrics = self._live.replicas[index].metrics
        metrics.is_up = False
        # There is nothing to say of a backend that was added, and removed before it was up.
        if (backend := metrics.backend) is not None:
            backend.down_reason = reason
            # Nobody asks it for its load any more.
            backend.forget_reports()
        for sequence in self._live.sequences.values():
            if sequence.home == index and sequence.phase is Phase.WAITING:
                self._live.set_home(sequence, -1)

    def _state(self, event: BackendState) -> None:
        if event.epoch != self._live.replicas[event.replica].epoch:
            return
        backend = self._backend(event.replica)
        backend.reported_running, backend.reported_waiting = event.running, event.waiting
        backend.reported_kv_ppm = event.kv_used_ppm

    def _forwarded(self, event: Forwarded) -> None:
        self._live.replicas[event.replica].metrics.is_up = True
        backend = self._backend(event.replica)
        backend.limit = event.limit
        backend.num_attempts += 1
        backend.num_hedges += event.hedge
        sequence = self._live.sequences.get((event.request, event.index))
        if sequence is None:
            return
        self._begin_attempt(sequence, event.attempt, event.replica, event.ts, is_hedge=event.hedge)
        if not event.hedge:
            self._live.start_running(sequence, event.replica, event.ts)

    def _begin_attempt(
        self, sequence: LiveSequenceMetrics, number: int, replica: int, sent_ns: int, *, is_hedge: bool = False
    ) -> None:
        backend = self._backend(replica)
        backend.num_running += 1
        sequence.attempts[number] = LiveAttempt(replica, backend, sent_ns, is_hedge)

    def _streamed(self, event: Streamed) -> None:
        self._rows = event.rows

    def _relayed(self, event: Relayed) -> None:
        rows, self._rows = self._rows, []
        dropped = set(event.dropped)
        for row, (request, index, attempt, num_tokens) in enumerate(rows):
            sequence = self._live.sequences.get((request, index))
            if row not in dropped and sequence is not None and attempt in sequence.attempts:
                self._go_on(sequence, sequence.attempts[attempt], num_tokens, event.ts)

    def _go_on(
        self, sequence: LiveSequenceMetrics, attempt: LiveAttempt, num_tokens: int, now_ns: int, *, ends: bool = False
    ) -> None:
        """It has so many output tokens now. Those that came at once have one gap before them, and those that the server
        counts at the end without having shown them have none.
        """
        if not attempt.has_answered:
            attempt.has_answered = True
            attempt.backend.first_token.observe(now_ns - attempt.sent_ns)
            attempt.backend.num_hedges_won += attempt.is_hedge
        num_new = num_tokens - sequence.output_tokens
        if num_new <= 0 or not sequence.request.generates:
            return
        sequence.output_tokens = num_tokens
        metrics = self._live.replicas[attempt.replica].metrics
        gap_ns = None
        if sequence.last_token_ns is None:
            self._live.first_token(sequence, metrics, now_ns)
        elif not ends:
            gap_ns = now_ns - sequence.last_token_ns
        sequence.last_token_ns = now_ns
        row = RelayedTokens(now_ns, attempt.replica, *sequence.identity, num_new, gap_ns)
        observe_relayed(row, metrics)
        attempt.backend.generation_tokens += num_new
        if self._sink is not None:
            self._sink.tokens_relayed(row)

    def _ended(self, event: ForwardEnded) -> None:
        sequence, attempt = self._find(event)
        if sequence is None or attempt is None:
            return
        attempt.backend.num_answers += 1
        if event.prompt_tokens >= 0:
            sequence.reported_prompt_tokens = event.prompt_tokens
        if event.cached_tokens >= 0:
            sequence.reported_cached_tokens = event.cached_tokens
        self._go_on(sequence, attempt, event.num_tokens, event.ts, ends=True)

    def _failed(self, event: ForwardFailed) -> None:
        sequence, attempt = self._find(event)
        if sequence is None or attempt is None:
            return
        failures = attempt.backend.failures
        failures[event.kind] = failures.get(event.kind, 0) + 1
        self._end_attempt(sequence, event.attempt)

    def _withdrawn(self, event: Withdrawn) -> None:
        sequence, attempt = self._find(event)
        if sequence is None or attempt is None:
            return
        attempt.backend.num_withdrawn += 1
        self._end_attempt(sequence, event.attempt)

    def _find(
        self, event: ForwardEnded | ForwardFailed | Withdrawn
    ) -> tuple[LiveSequenceMetrics | None, LiveAttempt | None]:
        """Those of an event; None for an attempt that is over."""
        sequence = self._live.sequences.get((event.request, event.index))
        return sequence, None if sequence is None else sequence.attempts.get(event.attempt)

    def _end_attempt(self, sequence: LiveSequenceMetrics, number: int) -> None:
        """One of a sequence is over. It runs where the other one is, if there is one."""
        sequence.attempts.pop(number).backend.num_running -= 1
        for attempt in sequence.attempts.values():
            self._live.move_running(sequence, attempt.replica)

    def _retry(self, event: RetrySet) -> None:
        self._backend(event.replica).num_retries += 1
        sequence = self._live.sequences.get((event.request, event.index))
        if sequence is not None and sequence.phase is Phase.RUNNING:
            self._live.set_home(sequence, -1)
            self._live.stop_running(sequence, event.ts)
