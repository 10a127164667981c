"""Explains where the time of a request went: replays the core and examines its state after every drain.

The verifier feeds the core, so an explanation describes what really happened, or fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from msgspec import Struct

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.bus.run_folder import TRACE_NAME, closed_segments
from eventlm.bus.segment_reader import SegmentReader
from eventlm.core.plugin import SequenceView
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import Sequence, State, Urgency
from eventlm.errors import UsageError
from eventlm.events import (
    Admitted,
    Arrived,
    BackendUp,
    Closing,
    Decision,
    Emitted,
    Fact,
    Finished,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Header,
    Launched,
    Preempted,
    Recovered,
    Rejected,
    Relayed,
    RetrySet,
    StepCompleted,
    Streamed,
    Withdrawn,
)
from eventlm.events.codec import FACT_TAGS
from eventlm.formatting import counted
from eventlm.replay.backend_names import names_at_start
from eventlm.replay.explain.forward_timeline import ForwardTimeline
from eventlm.replay.explain.life import order_of
from eventlm.replay.explain.result import Explanation, Order
from eventlm.replay.explain.timeline import Timeline, rows_of
from eventlm.replay.rebuild import Changes, rebuild
from eventlm.replay.verify.divergence_error import DivergenceError
from eventlm.replay.verify.verifier import Found, Verifier
from eventlm.types import OnProgress, SequenceId

_LINES_PER_PROGRESS = 1024


class Explained(Struct, frozen=True, kw_only=True):
    """The explanations in the requested order, and warnings on the trace."""

    path: str
    explanations: list[Explanation]
    warnings: list[str]


class Explainer:
    """Takes the lines of a trace in order and follows the wanted requests.

    wanted: by request, the indices of its samples; None: all of them. Raises Found at a divergence.
    """

    def __init__(
        self, verifier: Verifier, wanted: Mapping[int, list[int] | None], names: Mapping[int, str] | None = None
    ) -> None:
        self.found: dict[SequenceId, Explanation] = {}
        #: The tags of the events at the positions of wanted requests.
        self.tags: dict[int, str] = {}
        self._verifier = verifier
        self._core = verifier.core
        self._wanted = wanted
        #: Arrivals that have been neither admitted nor rejected yet.
        self.arriving: dict[int, Arrived] = {}
        self._live: dict[SequenceId, Timeline | ForwardTimeline] = {}
        #: Of replicas that are other servers.
        self._names = dict(names or {})
        #: The latest line.
        self.last_s, self._last_tag = -1, "header"

    @property
    def is_done(self) -> bool:
        """Whether all wanted requests have ended, and all decisions up to there are verified."""
        has_come = self.last_s >= max(self._wanted, default=-1) and self._last_tag not in ("header", "gap")
        return has_come and not self._live and not self.arriving and not self._verifier.expected

    def feed(self, line: LogLine) -> None:
        """Verify one line, and examine the core after it."""
        self._verifier.feed(line)
        self.last_s, self._last_tag = line.s, line.tag
        if line.s in self._wanted:
            self.tags[line.s] = line.tag
        if self._verifier.core is not self._core:
            last_ns = self._core.state.now_ns
            self._core = self._verifier.core
            self._resume(self._core.state, last_ns)
        elif line.tag == "backend_up":
            fact = line.event()
            assert isinstance(fact, BackendUp)
            self._names[fact.replica] = fact.name
            self._take(fact, list(self._verifier.expected))
        elif line.tag in FACT_TAGS and (self._live or self.arriving or line.s in self._wanted):
            fact = line.event()
            assert isinstance(fact, Fact)
            self._take(fact, list(self._verifier.expected))

    def end(self) -> None:
        """After the last line."""
        now_ns = self._core.state.now_ns
        for identity, timeline in self._live.items():
            self.found[identity] = timeline.cut(now_ns, "unfinished")
        self._live.clear()

    def _take(self, fact: Fact, decisions: Seq[Decision]) -> None:
        state = self._core.state
        if isinstance(fact, Arrived) and fact.s in self._wanted:
            self.arriving[fact.s] = fact
        if isinstance(fact, Recovered):
            for each in self._live.values():
                each.outlive(fact)
        for timeline in self._on_workers:
            timeline.check_worker(state, fact.ts)
        for decision in decisions:
            if isinstance(decision, Withdrawn) and (loser := self._forwarded(decision.request, decision.index)):
                loser.withdraw(decision)
        if isinstance(fact, ForwardEnded | ForwardFailed):
            self._end_attempt(fact)
        for decision in decisions:
            if isinstance(decision, Emitted) and isinstance(fact, StepCompleted):
                # Without an `emit` the fact is from a lost worker and has no effect.
                for timeline in self._on_workers:
                    timeline.complete(fact)
            elif isinstance(decision, Relayed) and isinstance(fact, Streamed):
                self._relay(fact, decision)
            self._note(state, decision)
        if fact.p:
            for each in self._live.values():
                each.settle(state)

    @property
    def _on_workers(self) -> Iterator[Timeline]:
        return (each for each in self._live.values() if isinstance(each, Timeline))

    def _forwarded(self, request: int, index: int) -> ForwardTimeline | None:
        """That of a followed sequence which is forwarded to other servers."""
        found = self._live.get(SequenceId(request, index))
        return found if isinstance(found, ForwardTimeline) else None

    def _end_attempt(self, fact: ForwardEnded | ForwardFailed) -> None:
        timeline = self._forwarded(fact.request, fact.index)
        if timeline is None:
            return
        if isinstance(fact, ForwardEnded):
            timeline.end(fact)
        else:
            timeline.fail(fact)

    def _relay(self, fact: Streamed, decision: Relayed) -> None:
        for row, (request, index, attempt, num_tokens) in enumerate(fact.rows):
            timeline = self._forwarded(request, index)
            if timeline is not None and row not in decision.dropped:
                timeline.go_on(attempt, num_tokens, fact.ts)

    def _note(self, state: CoreState, decision: Decision) -> None:
        """Apply a decision to the followed sequences."""
        if isinstance(decision, Launched):
            rows = rows_of(decision) if self._live else {}
            for timeline in self._on_workers:
                timeline.launch(decision, rows.get(timeline.sequence.id))
        elif isinstance(decision, Forwarded):
            for each in self._live.values():
                if isinstance(each, ForwardTimeline):
                    each.forward(decision)
        elif isinstance(decision, RetrySet) and (failed := self._forwarded(decision.request, decision.index)):
            failed.retry(decision)
        elif isinstance(decision, Admitted):
            self._admit(state, decision)
        elif isinstance(decision, Rejected):
            self._reject(state, decision)
        elif isinstance(decision, Preempted | Closing | Finished):
            identity = SequenceId(decision.request, decision.index)
            followed = self._live.get(identity)
            if followed is None:
                return
            if isinstance(followed, Timeline) and isinstance(decision, Preempted):
                followed.preempt(decision, _order_of(state, decision, followed.urgency))
            elif isinstance(followed, Timeline) and isinstance(decision, Closing):
                followed.close(decision.ts)
            elif isinstance(decision, Finished):
                self.found[identity] = followed.finish(decision)
                del self._live[identity]

    def _admit(self, state: CoreState, decision: Admitted) -> None:
        arrival = self.arriving.pop(decision.request, None)
        if arrival is None:
            return
        request = state.requests.get(decision.request)
        for index in self._indices(arrival):
            # A request that its deadline ended at its arrival is no longer in the state.
            sequence = _arrived(arrival, index) if request is None else request.sequences[index]
            timeline = self._timeline(sequence, state)
            timeline.arrive()
            self._live[timeline.sequence.id] = timeline

    def _timeline(self, sequence: Sequence, state: CoreState) -> Timeline | ForwardTimeline:
        if state.set_of(sequence).forwards is None:
            return Timeline(sequence, state)
        return ForwardTimeline(sequence, state, self._names)

    def _indices(self, arrival: Arrived) -> list[int]:
        n = arrival.n
        indices = self._wanted[arrival.s]
        return list(range(n)) if indices is None else [index for index in indices if index < n]

    def _reject(self, state: CoreState, decision: Rejected) -> None:
        arrival = self.arriving.pop(decision.request, None)
        if arrival is not None:
            self.found[SequenceId(arrival.s, 0)] = _rejection(state, arrival, decision)

    def _resume(self, state: CoreState, last_ns: int) -> None:
        """The log begins, or continues, with a snapshot; earlier events end at `last_ns`."""
        flying = _launches_in_flight(state)
        self.arriving.clear()
        for identity, timeline in list(self._live.items()):
            if _find(state, identity) is None:
                self.found[identity] = timeline.cut(last_ns, "unknown")
                del self._live[identity]
        for request in self._wanted:
            for index in self._indices(state.requests[request].arrival) if request in state.requests else []:
                identity = SequenceId(request, index)
                sequence = _find(state, identity)
                if sequence is not None:
                    timeline = self._live.setdefault(identity, self._timeline(sequence, state))
                    if isinstance(timeline, ForwardTimeline):
                        timeline.resume(sequence, last_ns, state)
                    else:
                        timeline.resume(sequence, last_ns, state.now_ns, flying)
                    timeline.settle(state)


def _order_of(state: CoreState, decision: Preempted, urgency: Urgency) -> Order | None:
    """Why a sequence of this urgency was preempted for another; both as at their admissions."""
    by = None if decision.by is None else _find(state, SequenceId(*decision.by))
    return None if by is None else order_of(state, by, by.urgency, urgency)


def _find(state: CoreState, identity: SequenceId) -> Sequence | None:
    """A sequence, unless it has ended."""
    request = state.requests.get(identity.request)
    sequence = None if request is None else request.sequences[identity.index]
    return None if sequence is None or sequence.state is State.FINISHED else sequence


def _arrived(arrival: Arrived, index: int) -> Sequence:
    """A sequence that ended at its arrival."""
    return Sequence(arrival, index, SequenceView.of(arrival, index, 0))


def _launches_in_flight(state: CoreState) -> list[Launched]:
    """The launches in flight of a snapshot; their times are unknown."""
    return [
        Launched(
            s=step.launch_seq,
            ts=state.now_ns,
            replica=replica.index,
            epoch=replica.epoch,
            step=step.step,
            decodes=[(s.request, s.index, s.num_tokens, 0) for s in step.decodes],
            chunks=[
                (row.sequence.request, row.sequence.index, row.start, row.end - row.start, 0) for row in step.chunks
            ],
            num_tokens=len(step.decodes) + sum(row.end - row.start for row in step.chunks),
            predicted_ns=0,
        )
        for replica in state.replicas
        for step in replica.in_flight
    ]


def _rejection(state: CoreState, arrival: Arrived, decision: Rejected) -> Explanation:
    """The explanation of a rejected request."""
    replicaset = state.replicasets[arrival.replicaset]
    config = replicaset.config
    if decision.reason == "context_length":
        note = f"prompt and max_tokens are {arrival.prompt_tokens + arrival.max_tokens:,} tokens"
        note += f", the context is {config.max_model_len:,}"
    else:
        free = sum(config.max_residents - len(replica.running) for replica in replicaset.replicas if replica.up)
        note = (
            f"{counted(replicaset.num_waiting + replicaset.num_closing, 'sequence')} waited, {free:,} slots were free"
        )
        note += f", and max_queue_len is {config.max_queue_len:,}"
    group = (
        f" (it came in a group of {arrival.group_size:,}, which is rejected as one)" if arrival.group_size > 1 else ""
    )
    timeline = Timeline(_arrived(arrival, 0), state)
    timeline.arrive()
    timeline.notes.append(note + group)
    return timeline.cut(decision.ts, f"rejected: {decision.reason}")


def explain(
    path: Path | str,
    requests: Seq[tuple[int, int | None]],
    *,
    trust_local_plugins: bool = False,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> Explained:
    """Explain (request, index) or, with index None, all samples of a request, as far as the trace goes.

    Raises UsageError for a request that the trace does not have, DivergenceError if the trace diverges from the replay,
    and as LogReader and `rebuild` do.
    """
    wanted = _by_request(requests)
    start = _header_before(Path(path), min(wanted, default=0))
    with LogReader(path, strict=strict) as reader:
        header = start or reader.header
        rebuilt = rebuild(header, Changes(trust_local_plugins=trust_local_plugins))
        explainer = Explainer(Verifier(rebuilt, header), wanted, names_at_start(header))
        line: LogLine | None = None
        is_done = False
        try:
            for line in reader.lines_from(header.s):
                explainer.feed(line)
                is_done = explainer.is_done
                if is_done:
                    break
                if on_progress is not None and line.number % _LINES_PER_PROGRESS == 0:
                    on_progress(reader.position, reader.size_bytes)
        except Found as found:
            assert line is not None
            consequence = "an explanation would be wrong"
            raise DivergenceError.at(reader.path, line, found, rebuilt.drift, consequence) from found
        explainer.end()
        warnings = [*rebuilt.drift, *([] if is_done else reader.warnings())]
        explanations = [each for asked in requests for each in _found(explainer, reader, *asked)]
        return Explained(path=reader.path, explanations=explanations, warnings=warnings)


def _header_before(path: Path, s: int) -> Header | None:
    """In a run of several files, the header of the last one that begins before event `s`, a valid start.
    None if there is no such file.
    """
    if not path.is_dir():
        return None
    before = [segment.path for segment in closed_segments(path) if segment.first_s < s]
    for candidate in [path / TRACE_NAME, *before[::-1]]:
        if candidate.exists():
            with SegmentReader(candidate) as reader:
                if reader.header.s < s:
                    return reader.header
    return None


def _by_request(requests: Seq[tuple[int, int | None]]) -> dict[int, list[int] | None]:
    wanted: dict[int, list[int] | None] = {}
    for request, index in requests:
        indices = wanted.setdefault(request, [])
        if index is None or indices is None:
            wanted[request] = None
        else:
            indices.append(index)
    return wanted


def _found(explainer: Explainer, reader: LogReader, request: int, index: int | None) -> list[Explanation]:
    """The explanations of a wanted request. Raises UsageError that says why there are none."""
    samples = [explanation for (seq, _), explanation in sorted(explainer.found.items()) if seq == request]
    # A request is rejected with all its samples.
    chosen = [each for each in samples if index in (None, each.index) or each.outcome.startswith("rejected")]
    if chosen:
        return chosen
    tag = explainer.tags.get(request)
    if request in explainer.arriving:
        raise UsageError(
            f"{reader.path} ends with the arrival of request {request}, and nothing is decided yet; try later"
        )
    if samples or (tag == "arrive" and index is not None):
        raise UsageError(f"{reader.path} has no sequence {request}.{index}: request {request} has fewer samples")
    # A trace that begins in the middle, or has a gap, may lack the arrivals of its requests.
    is_whole = reader.header.s == 0 and not reader.gaps
    if is_whole and not _has_arrivals(reader.path):
        what = (
            f"{reader.path} has no request {request}"
            if tag is None
            else f"event {request} of {reader.path} is not a request but `{tag}`"
        )
        raise UsageError(f"{what}, and none arrived in it; `eventlm trace ls` lists other runs")
    how = f"`eventlm explain {reader.path} --slowest 10` lists some"
    if tag is not None:
        raise UsageError(
            f"event {request} of {reader.path} is not a request but `{tag}`; a request's number is that of its "
            f"`arrive` event: {how}"
        )
    first, last = reader.header.s, explainer.last_s
    if request < first:
        raise UsageError(f"request {request} ended before {reader.path} begins, with event {first}; {how}")
    if request > last:
        raise UsageError(f"{reader.path} has no request {request}, its events are {first} to {last}; {how}")
    raise UsageError(f"request {request} came and ended in a gap of {reader.path}, where nothing was recorded; {how}")


def _has_arrivals(path: str) -> bool:
    """Whether a trace has any request; a server may have stopped before its first one."""
    with LogReader(path) as reader:
        return any(line.tag == "arrive" for line in reader.lines_from(reader.header.s))
