"""A run as a Perfetto trace, for ui.perfetto.dev and its trace processor.

    requests            a process; each of its tracks is a lane: one sequence at a time, its phases and chunks in it
    replica 0, 1, ...   a process for each, with its steps, a track for each stage of a pipeline, and its counters

Flows lead from a chunk to its step, and from a sequence to the one that was preempted for it. All times are nanoseconds
of the run; where the run has times of day, a clock snapshot ties both together. Names are written once and referred to
by number, so that an hour of a busy replica takes tens of megabytes.

The fields and their numbers are those of `protos/perfetto/trace` in Perfetto's repository.
"""

from __future__ import annotations

from typing import IO

from eventlm.events import Arrived, Finished, Header, Preempted, Rejected
from eventlm.metrics.rows import StepRow
from eventlm.replay.backend_names import replica_names
from eventlm.replay.export.lanes import Lanes
from eventlm.replay.export.protobuf import bytes_field, fixed64_field, text_field, varint_field
from eventlm.telemetry.attempts import TracedAttempt
from eventlm.telemetry.phases import TracedChunk, TracedSequence, TracedStep

# Trace and TracePacket.
_packet = bytes_field(1)
_clock_snapshot = bytes_field(6)
_timestamp = varint_field(8)
_sequence_id = varint_field(10)
_track_event = bytes_field(11)
_interned_data = bytes_field(12)
_sequence_flags = varint_field(13)
_track_descriptor = bytes_field(60)
# ClockSnapshot and its Clock.
_clock, _primary_clock = bytes_field(1), varint_field(2)
_clock_id, _clock_ns = varint_field(1), varint_field(2)
# InternedData, with an (iid, name) for each.
_event_names, _argument_names = bytes_field(2), bytes_field(3)
_iid, _interned_name = varint_field(1), text_field(2)
# TrackDescriptor, with ProcessDescriptor, ThreadDescriptor and CounterDescriptor.
_uuid, _track_name, _process, _thread = varint_field(1), text_field(2), bytes_field(3), bytes_field(4)
_parent_uuid, _counter, _child_ordering, _rank = varint_field(5), bytes_field(8), varint_field(11), varint_field(12)
_pid, _process_name = varint_field(1), text_field(6)
_tid, _thread_name = varint_field(2), text_field(5)
_unit_name = text_field(6)
# TrackEvent and DebugAnnotation.
_argument = bytes_field(4)
_type, _name_iid, _track_uuid, _name = varint_field(9), varint_field(10), varint_field(11), text_field(23)
_counter_value, _flow_id, _end_of_flow = varint_field(30), fixed64_field(47), fixed64_field(48)
_argument_iid, _int_value, _text_value = varint_field(1), varint_field(4), text_field(6)

# Of the enums in them.
_BOOTTIME, _REALTIME = 6, 1
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_EXPLICIT = 3
_BEGIN, _END, _INSTANT, _COUNTER = map(_type, (1, 2, 3, 4))

_STEP_NAMES = ("prefill step", "decode step", "mixed step")
_NAMES = (
    *("edge", "queue", "prefill", "decode", "preempted", "recompute", "text_end", "chunk"),
    *("preempts", "is preempted", *_STEP_NAMES, "step", "exchange", "retry", "first token"),
)
_ARGUMENTS = (
    *("request", "index", "prompt_tokens", "max_tokens", "priority", "service_class", "model", "replica"),
    *("outcome", "output_tokens", "cached_tokens", "position", "tokens", "reason", "by"),
    *("event", "step", "rows", "chunks", "predicted_ns", "waited_ns"),
)
_EVENT_NAME = {name: _name_iid(iid) for iid, name in enumerate(_NAMES, start=1)}
_ARGUMENT_KEY = {name: _argument_iid(iid) for iid, name in enumerate(_ARGUMENTS, start=1)}

_REQUESTS_UUID = 1
#: Of the first replica; then one each.
_FIRST_REPLICA_UUID = 2
#: Begins every packet but the first.
_IN_SEQUENCE = _sequence_id(1) + _sequence_flags(_NEEDS_STATE)


def _arguments(**values: int | str) -> bytes:
    return b"".join(
        _argument(_ARGUMENT_KEY[name] + (_text_value(value) if isinstance(value, str) else _int_value(value)))
        for name, value in values.items()
    )


class PerfettoWriter:
    """Writes packets to a binary file as it gets what they say. It keeps no more than the live sequences need."""

    def __init__(self, file: IO[bytes]) -> None:
        self._write = file.write
        self._next_uuid = _FIRST_REPLICA_UUID
        self._next_flow = 1
        self._request_lanes = Lanes()
        #: The track of each lane, and the lane of each live sequence.
        self._request_tracks: list[int] = []
        self._lane_of: dict[tuple[int, int], int] = {}
        #: By replica.
        self._step_lanes: list[Lanes] = []
        self._step_tracks: list[list[int]] = []
        #: By replica and stage.
        self._stage_tracks: dict[tuple[int, int], int] = {}
        #: By replica and name.
        self._counter_tracks: dict[tuple[int, str], int] = {}
        self._rejected_track = 0

    def begin(self, header: Header) -> None:
        """The names, the processes, and the time of day."""
        interned = b"".join(_event_names(_iid(iid) + _interned_name(name)) for iid, name in enumerate(_NAMES, 1))
        interned += b"".join(
            _argument_names(_iid(iid) + _interned_name(name)) for iid, name in enumerate(_ARGUMENTS, 1)
        )
        first = _sequence_id(1) + _sequence_flags(_STATE_CLEARED) + _interned_data(interned)
        unix_start_ns = int(header.unix_start_ns)
        if unix_start_ns > 0:
            clocks = ((_BOOTTIME, header.ts), (_REALTIME, unix_start_ns + header.ts))
            snapshot = b"".join(_clock(_clock_id(clock) + _clock_ns(ns)) for clock, ns in clocks)
            first += _clock_snapshot(snapshot + _primary_clock(_BOOTTIME))
        self._write(_packet(first))
        self._add_process(_REQUESTS_UUID, f"{header.run}: requests")
        for index, name in enumerate(replica_names(header)):
            self._add_process(_FIRST_REPLICA_UUID + index, name)
            self._step_lanes.append(Lanes())
            self._step_tracks.append([])
        self._next_uuid = _FIRST_REPLICA_UUID + header.num_replicas

    def _add_process(self, uuid: int, name: str) -> None:
        process = _process(_pid(uuid) + _process_name(name))
        self._write(_packet(_IN_SEQUENCE + _track_descriptor(_uuid(uuid) + process + _child_ordering(_EXPLICIT))))

    def _add_track(self, parent: int, name: str, rank: int, kind: bytes = b"") -> int:
        uuid = self._next_uuid
        self._next_uuid += 1
        descriptor = _uuid(uuid) + _parent_uuid(parent) + _track_name(name) + _rank(rank) + kind
        self._write(_packet(_IN_SEQUENCE + _track_descriptor(descriptor)))
        return uuid

    def _event(self, ns: int, track: int, fields: bytes) -> None:
        self._write(_packet(_IN_SEQUENCE + _timestamp(ns) + _track_event(_track_uuid(track) + fields)))

    def _track_of(self, sequence: TracedSequence) -> int:
        return self._request_tracks[self._lane_of[sequence.identity]]

    def sequence_began(self, sequence: TracedSequence) -> None:
        """The outermost slice of a lane begins."""
        lane = self._request_lanes.take(sequence.start_ns)
        if lane == len(self._request_tracks):
            self._request_tracks.append(self._add_track(_REQUESTS_UUID, f"lane {lane}", lane))
        self._lane_of[sequence.identity] = lane
        arrival = sequence.arrival
        arguments = _arguments(
            request=arrival.s,
            index=sequence.index,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.max_tokens,
            priority=arrival.scheduling.priority,
        )
        if arrival.scheduling.service_class:
            arguments += _arguments(service_class=arrival.scheduling.service_class)
        if arrival.scheduling.adapter:
            arguments += _arguments(model=arrival.scheduling.adapter)
        name = _name(f"request {sequence.name}")
        self._event(sequence.start_ns, self._request_tracks[lane], _BEGIN + name + arguments)

    def phase_began(self, sequence: TracedSequence) -> None:
        """A slice in that of its sequence begins."""
        fields = _BEGIN + _EVENT_NAME[sequence.phase]
        if sequence.phase not in ("edge", "queue", "preempted", "retry"):
            fields += _arguments(replica=sequence.replica)
        self._event(sequence.phase_ns, self._track_of(sequence), fields)

    def phase_ended(self, sequence: TracedSequence, ns: int) -> None:
        """It ends."""
        self._event(ns, self._track_of(sequence), _END)

    def preempted(self, sequence: TracedSequence, event: Preempted, by: TracedSequence | None) -> None:
        """An instant of the victim, and one of the preemptor that leads to it."""
        fields = _INSTANT + _EVENT_NAME["is preempted"] + _arguments(reason=event.reason, replica=event.replica)
        if by is not None:
            flow, self._next_flow = self._next_flow, self._next_flow + 1
            victim = _arguments(request=event.request, index=event.index)
            self._event(event.ts, self._track_of(by), _INSTANT + _EVENT_NAME["preempts"] + victim + _flow_id(flow))
            fields += _arguments(by=by.name) + _end_of_flow(flow)
        self._event(event.ts, self._track_of(sequence), fields)

    def sequence_ended(self, sequence: TracedSequence, ns: int, outcome: str, finished: Finished | None) -> None:
        """Its slice ends, and its lane is free."""
        arguments = _arguments(outcome=outcome)
        if finished is not None:
            arguments += _arguments(output_tokens=finished.position, cached_tokens=finished.cached_tokens)
        self._event(ns, self._track_of(sequence), _END + arguments)
        self._request_lanes.give(self._lane_of.pop(sequence.identity), ns)

    def request_rejected(self, arrival: Arrived, event: Rejected) -> None:
        """An instant on a track of its own."""
        if not self._rejected_track:
            # Above the lanes.
            self._rejected_track = self._add_track(_REQUESTS_UUID, "rejected", -1)
        arguments = _arguments(request=arrival.s, prompt_tokens=arrival.prompt_tokens, reason=event.reason)
        self._event(event.ts, self._rejected_track, _INSTANT + _name(f"request {arrival.s}") + arguments)

    def step_ended(self, step: TracedStep) -> None:
        """Its chunks, and if it is in the window the step, to which they lead."""
        start_ns = max(min(step.fact.start_ns, step.fact.end_ns), 0)
        end_ns = max(step.fact.end_ns, start_ns)
        flows = b""
        for chunk in step.chunks:
            flow = b""
            if step.in_window:
                # A chunk that is drawn after the begin of its step is where the flow ends.
                leads = chunk.start_ns <= start_ns
                flow = (_flow_id if leads else _end_of_flow)(self._next_flow)
                flows += (_end_of_flow if leads else _flow_id)(self._next_flow)
                self._next_flow += 1
            self._write_chunk(chunk, step.launched.step, flow)
        if step.in_window:
            self._write_step(step, start_ns, end_ns, flows)

    def _write_chunk(self, chunk: TracedChunk, step: int, flow: bytes) -> None:
        track = self._track_of(chunk.sequence)
        arguments = _arguments(step=step, position=chunk.position, tokens=chunk.num_tokens)
        self._event(chunk.start_ns, track, _BEGIN + _EVENT_NAME["chunk"] + arguments + flow)
        self._event(chunk.end_ns, track, _END)

    def _write_step(self, step: TracedStep, start_ns: int, end_ns: int, flows: bytes) -> None:
        launched = step.launched
        lanes, tracks = self._step_lanes[launched.replica], self._step_tracks[launched.replica]
        lane = self._take_lane(launched.replica, start_ns, "steps")
        kind = _STEP_NAMES[2 if launched.chunks and launched.decodes else 1 if launched.decodes else 0]
        arguments = _arguments(
            event=launched.s,
            step=launched.step,
            rows=len(launched.decodes) + len(launched.chunks),
            chunks=len(launched.chunks),
            tokens=launched.num_tokens,
            predicted_ns=launched.predicted_ns,
        )
        self._event(start_ns, tracks[lane], _BEGIN + _EVENT_NAME[kind] + arguments + flows)
        self._event(end_ns, tracks[lane], _END)
        lanes.give(lane, end_ns)

    def _take_lane(self, replica: int, start_ns: int, name: str) -> int:
        """A lane of a replica for a slice, with a track."""
        lane, tracks = self._step_lanes[replica].take(start_ns), self._step_tracks[replica]
        if lane == len(tracks):
            tracks.append(self._add_thread(replica, f"{name} {lane}" if lane else name, lane))
        return lane

    def attempt_ended(self, attempt: TracedAttempt) -> None:
        """A slice under the replica that is the server."""
        lane = self._take_lane(attempt.replica, attempt.sent_ns, "attempts")
        track = self._step_tracks[attempt.replica][lane]
        arguments = _arguments(
            request=attempt.request,
            index=attempt.index,
            outcome=attempt.end,
            output_tokens=attempt.total - attempt.before,
            cached_tokens=attempt.cached_tokens,
        )
        self._event(attempt.sent_ns, track, _BEGIN + _name(attempt.name) + arguments)
        if attempt.first_ns >= 0:
            self._event(attempt.first_ns, track, _INSTANT + _EVENT_NAME["first token"])
        self._event(attempt.ended_ns, track, _END)
        self._step_lanes[attempt.replica].give(lane, attempt.ended_ns)

    def stages_ended(self, row: StepRow) -> None:
        """A slice for each stage, and before it one for the way there."""
        came_ns = row.stages[0][0]
        for stage, ((start_ns, end_ns), wait_ns) in enumerate(zip(row.stages, row.stage_waits_ns, strict=True)):
            track = self._stage_tracks.get((row.replica, stage))
            if track is None:
                # Below the steps.
                track = self._add_thread(row.replica, f"stage {stage}", 500 + stage)
                self._stage_tracks[row.replica, stage] = track
            if came_ns + wait_ns < start_ns:
                self._event(came_ns + wait_ns, track, _BEGIN + _EVENT_NAME["exchange"] + _arguments(step=row.step))
                self._event(start_ns, track, _END)
            arguments = _arguments(step=row.step, rows=row.batch_size, tokens=row.batch_num_tokens, waited_ns=wait_ns)
            self._event(start_ns, track, _BEGIN + _EVENT_NAME["step"] + arguments)
            self._event(max(end_ns, start_ns), track, _END)
            came_ns = end_ns

    def _add_thread(self, replica: int, name: str, rank: int) -> int:
        """A track of slices under a replica."""
        parent = _FIRST_REPLICA_UUID + replica
        thread = _thread(_pid(parent) + _tid(self._next_uuid) + _thread_name(name))
        return self._add_track(parent, name, rank, thread)

    def counter(self, replica: int, name: str, ns: int, value: int) -> None:
        """A counter of a replica has this value from now on."""
        track = self._counter_tracks.get((replica, name))
        if track is None:
            # Below the steps.
            rank = 1000 + len(self._counter_tracks)
            parent = _FIRST_REPLICA_UUID + replica
            track = self._add_track(parent, name, rank, _counter(_unit_name(name)))
            self._counter_tracks[replica, name] = track
        self._event(ns, track, _COUNTER + _counter_value(value))

    def end(self) -> None:
        """There is nothing that closes a trace."""
