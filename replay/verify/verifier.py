"""Verification: applies a trace's facts to a core and compares every decision with the recorded one.

Decisions are compared as bytes, so most lines are never decoded. The first difference ends the run and is explained:
what was recorded and replayed, the chain of causes back to the request, the replayed state.

Later segments of a run begin with a snapshot. If the log begins there, or continues after a gap, the core is restored
from it. Otherwise it must equal the state of the replay.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.core.core import Core
from eventlm.core.state.validate import validate, validate_liveness
from eventlm.errors import InvariantError, LivenessError, TraceCorruptError
from eventlm.events import Checkpoint, Decision, Event, Fact, Gap, Header, Marker, Snapshot
from eventlm.events.codec import DECISION_TAGS, encode_body
from eventlm.replay.rebuild import Changes, Rebuilt, rebuild
from eventlm.replay.verify.divergence import (
    Code,
    Divergence,
    as_object,
    classify,
    differing_fields,
    one_line,
    requests_named,
    state_lines,
)
from eventlm.system.disk import SYSTEM_DISK, Disk
from eventlm.types import OnProgress

#: Links of a causal chain, at most.
MAX_CHAIN = 12


class VerifyResult(Struct, frozen=True, kw_only=True):
    """The result of a verification. `exit_code` is 0 if every decision was as recorded.

    change: the changes to the run, as text. Under a change digests are not compared, because the state may differ (it
    contains the policy in force) long before a decision does.
    first_s: the first event of the trace, above 0 if the run's first segments were not kept. num_missing: events in
    gaps; both sides of a gap are verified.
    """

    path: str
    num_events: int
    num_decisions: int
    num_checkpoints: int
    num_segments: int = 1
    first_s: int = 0
    num_missing: int = 0
    clean_end: bool
    still_being_written: bool
    change: str = ""
    warnings: list[str] = []
    divergence: Divergence | None = None

    @property
    def exit_code(self) -> int:
        """That of the divergence, else of the gaps, else 0."""
        if self.divergence is not None:
            return self.divergence.exit_code
        return Code.GAP.value.exit_code if self.num_missing else 0


class Found(Exception):
    """A divergence, raised where it is found."""

    def __init__(self, code: Code, what: str, recorded: Event | None = None, replayed: Event | None = None) -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.recorded = recorded
        self.replayed = replayed


class Verifier:
    """Takes the lines of a trace in order. `check_invariants` validates the state after every fact.

    core: to begin at the event that it comes to next, between two drains; None: from the first line.
    """

    def __init__(
        self,
        rebuilt: Rebuilt,
        header: Header,
        *,
        core: Core | None = None,
        check_digests: bool = True,
        check_invariants: bool = False,
    ) -> None:
        self.core = rebuilt.new_core() if core is None else core
        self.num_decisions = 0
        self.num_checkpoints = 0
        self._rebuilt = rebuilt
        self._header = header
        self._compare_digests = check_digests
        self._check_invariants = check_invariants
        #: Decisions of the latest apply that have not been compared yet.
        self.expected: deque[Decision] = deque()
        #: Whether the core's state is unknown until the next snapshot.
        self._is_lost = core is None and header.s > 0
        #: The next event, unless there is a gap.
        self._next_s = header.s if core is None else core.next_seq

    def feed(self, line: LogLine) -> Event | None:
        """Check one line; returns its event unless it was compared as bytes. Raises Found at the first difference."""
        next_s, self._next_s = self._next_s, line.s + 1
        if line.tag in DECISION_TAGS and not self._is_lost:
            self._compare(line)
            return None
        event = line.event()
        if encode_body(event) != line.body:
            raise _damaged(line, "its encoding is not that of eventlm")
        if line.s != next_s:
            self._enter_gap(event, next_s)
        if self.expected:
            extra = self.expected[0]
            raise Found(Code.EXTRA_DECISION, f"the trace continues with `{line.tag}`", event, extra)
        if isinstance(event, Header):
            self._begin_segment(event, line)
        elif isinstance(event, Gap) and line.number != 2:
            raise Found(Code.GAP, f"events {event.first} to {event.last} are missing: {event.reason}", event)
        elif isinstance(event, Snapshot):
            self._take_snapshot(event, line)
        elif self._is_lost and not isinstance(event, Gap):
            raise _damaged(line, "the segment has no snapshot")
        elif isinstance(event, Checkpoint) and self._compare_digests:
            self._check_digests(event)
        if isinstance(event, Fact | Marker) and not self._is_lost:
            self._apply(event)
        return event

    def _begin_segment(self, header: Header, line: LogLine) -> None:
        if line.number != 1:
            raise _damaged(line, "it is a second header")
        of_segment = {name: getattr(self._header, name) for name in ("s", "ts", "c", "previous_h")}
        if structs.replace(header, **of_segment) != self._header:
            raise _damaged(line, "its header differs from that of the run's first segment")

    def _enter_gap(self, event: Event, next_s: int) -> None:
        """The reader has found a gap, which may begin with decisions of the last fact."""
        self.expected.clear()
        self._is_lost = True
        if not self._compare_digests:
            what = f"events {next_s} to {event.s - 1} are missing: under a change the rest cannot be verified"
            raise Found(Code.GAP, what, event)

    def _take_snapshot(self, snapshot: Snapshot, line: LogLine) -> None:
        if self._is_lost:
            try:
                self.core = self._rebuilt.restored_core(bytes(snapshot.state))
                if self._compare_digests:
                    # An invalid snapshot would fail anywhere later. Under a change the limits may differ.
                    validate(self.core.state)
            except (InvariantError, LookupError) as error:
                raise _damaged(line, str(error)) from error
            self._is_lost = False
        elif self._compare_digests and self.core.snapshot() != bytes(snapshot.state):
            differing = _differing(self.core.snapshot(), bytes(snapshot.state))
            raise Found(Code.SNAPSHOT, f"the segment starts from another state: {differing}")

    def _compare(self, line: LogLine) -> None:
        if not self.expected:
            raise Found(Code.MISSING_DECISION, "the replay had nothing more to decide", line.event())
        replayed = self.expected.popleft()
        if encode_body(replayed) == line.body:
            self.num_decisions += 1
            return
        self.expected.appendleft(replayed)
        raise Found(Code.DIFFERENT_DECISION, f"decision {line.s} differs", line.event(), replayed)

    def _apply(self, event: Fact | Marker) -> None:
        try:
            self.expected.extend(self.core.apply(event))
            if self._check_invariants:
                validate(self.core.state)
                if isinstance(event, Fact) and event.p:
                    validate_liveness(self.core.state)
        except LivenessError as error:
            raise Found(Code.LIVENESS, str(error), event) from error
        except InvariantError as error:
            raise Found(Code.SAFETY, str(error), event) from error

    def _check_digests(self, checkpoint: Checkpoint) -> None:
        digests = self.core.digests()
        if digests != checkpoint.digests:
            differing = [name for name in digests if digests[name] != checkpoint.digests.get(name)]
            replayed = Checkpoint(s=checkpoint.s, ts=checkpoint.ts, c=checkpoint.c, digests=digests)
            raise Found(Code.STATE_DIGEST, f"digests of {', '.join(differing)} differ", checkpoint, replayed)
        self.num_checkpoints += 1


def _damaged(line: LogLine, what: str) -> TraceCorruptError:
    return TraceCorruptError(f"{line.path} is damaged at line {line.number}, byte {line.byte_offset}: {what}")


def _differing(replayed: bytes, recorded: bytes) -> str:
    """The parts in which two snapshots differ."""
    after, before = msgspec.json.decode(replayed), msgspec.json.decode(recorded)
    return ", ".join(name for name in after if after[name] != before.get(name)) + " differ"


def verify(
    path: Path | str,
    *,
    changes: Changes | None = None,
    strict: bool = False,
    check_invariants: bool = False,
    on_progress: OnProgress | None = None,
    disk: Disk = SYSTEM_DISK,
) -> VerifyResult:
    """Verify a trace, on the host's disk or another. Raises what LogReader raises for files that are damaged or not
    traces.
    """
    with LogReader(path, strict=strict, disk=disk) as reader:
        rebuilt = rebuild(reader.header, changes)
        drift = rebuilt.drift
        change = changes.describe() if changes is not None else ""
        verifier = Verifier(rebuilt, reader.header, check_digests=not change, check_invariants=check_invariants)
        divergence = None
        line: LogLine | None = None
        try:
            for line in reader:
                verifier.feed(line)
                if on_progress is not None and line.number % 1024 == 0:
                    on_progress(reader.position, reader.size_bytes)
        except Found as found:
            assert line is not None
            with LogReader(path, disk=disk) as second_reader:
                divergence = _explain(second_reader, verifier, line, found, _drift_code(changes, drift))
        if on_progress is not None:
            on_progress(reader.position, reader.size_bytes)
        return VerifyResult(
            path=str(path),
            num_events=reader.num_lines,
            num_decisions=verifier.num_decisions,
            num_checkpoints=verifier.num_checkpoints,
            num_segments=reader.num_segments,
            first_s=reader.header.s,
            num_missing=reader.num_missing,
            clean_end=reader.clean_end,
            still_being_written=reader.still_being_written,
            change=change,
            warnings=[*drift, *(reader.warnings() if divergence is None else [])],
            divergence=divergence,
        )


def _drift_code(changes: Changes | None, drift: list[str]) -> Code | None:
    """The known cause of a difference, if any."""
    if changes is not None and changes.settings:
        return Code.CONFIG_DRIFT
    if drift or (changes is not None and (changes.policy or changes.batcher or changes.router)):
        return Code.POLICY_DRIFT
    return None


def _explain(reader: LogReader, verifier: Verifier, line: LogLine, found: Found, drift: Code | None) -> Divergence:
    code = found.code
    if code is Code.DIFFERENT_DECISION:
        code = classify(_decisions_from(reader, line.s), verifier.expected)
    if drift is not None and code.value.exit_code == Code.DIFFERENT_DECISION.value.exit_code:
        code = drift
    recorded = as_object(found.recorded) if found.recorded is not None else None
    replayed = as_object(found.replayed) if found.replayed is not None else None
    same_kind = recorded is not None and replayed is not None and recorded["t"] == replayed["t"]
    fields = differing_fields(recorded, replayed) if same_kind and recorded and replayed else []
    requests = requests_named(recorded, replayed)
    return Divergence(
        code=code.name.lower(),
        exit_code=code.value.exit_code,
        cause=code.value.cause,
        remedy=code.value.remedy,
        s=line.s,
        line=line.number,
        path=line.path,
        what=found.what,
        recorded=recorded,
        replayed=replayed,
        fields=fields,
        chain=_chain(reader, line, requests),
        state=state_lines(verifier.core, requests),
    )


def _decisions_from(reader: LogReader, s: int) -> list[Event]:
    """The recorded decisions from `s` to the end of their apply."""
    return [line.event() for line in takewhile(lambda line: line.tag in DECISION_TAGS, reader.lines_from(s))]


def _chain(reader: LogReader, line: LogLine, requests: list[int]) -> list[str]:
    """The event, its chain of causes, and the arrivals of the requests that the difference names."""
    links: list[str] = []
    s = line.s
    first_s = reader.header.s
    while s > first_s and len(links) < MAX_CHAIN:
        event = _event_at(reader, s)
        links.append(one_line(event))
        # A cause precedes its effect; a forged trace may say otherwise.
        s = event.c if event.c < s else 0
    if s > first_s:
        links.append("...")
    for request in requests[:3]:
        if first_s < request < line.s:
            arrival = one_line(_event_at(reader, request))
            if arrival not in links:
                links.append(arrival)
    return links


def _event_at(reader: LogReader, s: int) -> Event:
    return next(iter(reader.lines_from(s))).event()
