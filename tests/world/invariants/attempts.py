"""What the log of a gateway must show of attempts at backends: each attempt is allowed and paid for, and output is
shown from only one attempt at a time.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.config.structs import GatewayConfig
from eventlm.core.state.backend_state import GIVEN_PPM, RETRY_PPM
from eventlm.errors import EventLMError
from eventlm.events import Arrived, Event, Forwarded, ForwardFailed, Relayed, RetrySet, Streamed, Withdrawn
from eventlm.system.disk import Disk
from eventlm.types import SequenceId
from tests.world.invariants.checks import Checks


def check_attempts(checks: Checks, run_folder: Path | None, disk: Disk, config: GatewayConfig) -> None:
    """Check the attempts of a complete log."""
    if run_folder is None:
        return
    try:
        with LogReader(run_folder, disk=disk) as reader:
            events = [line.event() for line in reader]
    except EventLMError:
        return
    # The oldest files may have been removed.
    if not reader.gaps and events and events[0].s == 0:
        attempts = Attempts(checks, config)
        for event in events:
            attempts.take(event)


class Attempts:
    """Follows the attempts of a log, event by event."""

    def __init__(self, checks: Checks, config: GatewayConfig) -> None:
        self._checks = checks
        self._most = 1 + config.forward_retries
        self._share_ppm = config.retry_budget_percent * 10_000
        self._arrived: dict[int, Arrived] = {}
        #: Attempts of each sequence, without hedges.
        self._num_attempts: Counter[SequenceId] = Counter()
        self._num_first = self._num_more = 0
        self._begun: set[SequenceId] = set()
        self._streamed: list[tuple[int, int, int, int]] = []
        #: The attempt whose output was shown last, and how many tokens of the answer were shown.
        self._shown: dict[SequenceId, tuple[int, int]] = {}
        #: The numbers of the attempts that are under way.
        self._under_way: dict[SequenceId, set[int]] = {}

    def take(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case Arrived():
                self._arrived[event.s] = event
            case Forwarded():
                self._forward(event, SequenceId(event.request, event.index))
            case ForwardFailed() | Withdrawn():
                self._under_way[SequenceId(event.request, event.index)].discard(event.attempt)
            case Streamed(rows=rows):
                self._streamed = rows
                self._begun |= {SequenceId(row[0], row[1]) for row in rows}
            case Relayed():
                self._relay(event)
            case RetrySet():
                identity, deadline_ns = SequenceId(event.request, event.index), self._deadline_ns(event.request)
                if identity not in self._begun and deadline_ns:
                    where = f"event {event.s}: {identity}"
                    self._checks.check("no retry is due after the deadline", event.due_ns < deadline_ns, where)

    def _forward(self, event: Forwarded, identity: SequenceId) -> None:
        checks, is_first = self._checks, event.attempt == 1
        self._num_attempts[identity] += not event.hedge
        self._num_first, self._num_more = self._num_first + is_first, self._num_more + (not is_first)
        where = f"event {event.s}: attempt {event.attempt} of {identity}"
        checks.check("attempts are few", self._num_attempts[identity] <= self._most, where)
        paid_ppm, earned_ppm = self._num_more * RETRY_PPM, GIVEN_PPM + self._num_first * self._share_ppm
        checks.check("retries keep to their budget", paid_ppm <= earned_ppm, f"{where}: {self._num_more} more")
        under_way = self._under_way.setdefault(identity, set())
        if event.hedge:
            checks.check("hedges are of requests without output", identity not in self._shown, where)
            checks.check("a hedge is the second attempt at once", len(under_way) == 1, f"{where}: {under_way}")
        else:
            checks.check("one attempt at once except hedges", not under_way, f"{where}: {under_way}")
        under_way.add(event.attempt)
        deadline_ns = self._deadline_ns(event.request)
        if identity not in self._begun and deadline_ns and self._arrived[event.request].scheduling.drop_if_late:
            checks.check("nothing is sent too late", event.ts <= deadline_ns, where)

    def _relay(self, event: Relayed) -> None:
        for row, (request, index, attempt, num_tokens) in enumerate(self._streamed):
            if row in event.dropped:
                continue
            identity = SequenceId(request, index)
            before, num_before = self._shown.get(identity, (attempt, 0))
            where = f"event {event.s}: attempt {attempt} of {identity} after {before}"
            is_over = before == attempt or before not in self._under_way[identity]
            self._checks.check("one attempt at a time is shown", is_over, where)
            self._checks.check("tokens are shown once", num_tokens >= num_before, f"{where}: {num_tokens}")
            self._shown[identity] = attempt, num_tokens
        self._streamed = []

    def _deadline_ns(self, request: int) -> int:
        arrived = self._arrived[request]
        deadline_ns = arrived.scheduling.deadline_ns
        return deadline_ns and arrived.ts + deadline_ns
