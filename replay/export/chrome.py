"""A run in the Trace Event Format, the JSON of chrome://tracing, which many viewers read.

Sequences are asynchronous events, because synchronous ones that overlap in a track are drawn wrongly. The steps of a
replica and of its stages are complete events. Times are microseconds of the run, with decimals.
"""

from __future__ import annotations

from typing import IO, Any

import msgspec

from eventlm.events import Arrived, Finished, Header, Preempted, Rejected
from eventlm.metrics.rows import StepRow
from eventlm.replay.backend_names import replica_names
from eventlm.replay.export.lanes import Lanes
from eventlm.telemetry.attempts import TracedAttempt
from eventlm.telemetry.phases import TracedSequence, TracedStep

_REQUESTS_PID = 1
#: Of the first replica; then one each.
_FIRST_REPLICA_PID = 2
#: Of the first stage of each replica, after all lanes of its steps.
_FIRST_STAGE_TID = 1000


class ChromeWriter:
    """Writes events as it gets what they say, to a binary file: one object on each line, in one array."""

    def __init__(self, file: IO[bytes]) -> None:
        self._write = file.write
        self._encode = msgspec.json.Encoder().encode
        self._step_lanes: list[Lanes] = []
        #: (replica, stage) that have a name.
        self._stages: set[tuple[int, int]] = set()

    def begin(self, header: Header) -> None:
        """The processes."""
        self._write(b'{"displayTimeUnit":"ms","otherData":')
        self._write(self._encode({"run": header.run, "unix_start_ns": header.unix_start_ns}))
        self._write(b',"traceEvents":[\n')
        self._write(self._encode(_process_name(_REQUESTS_PID, "requests")))
        for index, name in enumerate(replica_names(header)):
            self._step_lanes.append(Lanes())
            self._add(_process_name(_FIRST_REPLICA_PID + index, name))

    def _add(self, event: dict[str, Any]) -> None:
        self._write(b",\n" + self._encode(event))

    def _async(self, kind: str, sequence: TracedSequence, name: str, ns: int, arguments: dict[str, Any]) -> None:
        """b: begin, n: an instant, e: end."""
        event = {"ph": kind, "cat": "request", "id": sequence.name, "name": name, "ts": ns / 1000}
        self._add(event | {"pid": _REQUESTS_PID, "tid": 0, "args": arguments})

    def sequence_began(self, sequence: TracedSequence) -> None:
        """The outermost slice of its id begins."""
        arrival = sequence.arrival
        arguments = {
            "request": arrival.s,
            "index": sequence.index,
            "prompt_tokens": arrival.prompt_tokens,
            "max_tokens": arrival.max_tokens,
            "priority": arrival.scheduling.priority,
            "service_class": arrival.scheduling.service_class,
            "model": arrival.scheduling.adapter or arrival.scheduling.model,
        }
        self._async("b", sequence, f"request {sequence.name}", sequence.start_ns, arguments)

    def phase_began(self, sequence: TracedSequence) -> None:
        """A slice in that of its sequence begins."""
        on_replica = sequence.phase not in ("edge", "queue", "preempted", "retry")
        arguments = {"replica": sequence.replica} if on_replica else {}
        self._async("b", sequence, sequence.phase, sequence.phase_ns, arguments)

    def phase_ended(self, sequence: TracedSequence, ns: int) -> None:
        """It ends."""
        self._async("e", sequence, sequence.phase, ns, {})

    def preempted(self, sequence: TracedSequence, event: Preempted, by: TracedSequence | None) -> None:
        """An instant."""
        arguments: dict[str, Any] = {"reason": event.reason, "replica": event.replica}
        if by is not None:
            arguments["by"] = by.name
        self._async("n", sequence, "is preempted", event.ts, arguments)

    def sequence_ended(self, sequence: TracedSequence, ns: int, outcome: str, finished: Finished | None) -> None:
        """Its slice ends."""
        arguments: dict[str, Any] = {"outcome": outcome}
        if finished is not None:
            arguments |= {"output_tokens": finished.position, "cached_tokens": finished.cached_tokens}
        self._async("e", sequence, f"request {sequence.name}", ns, arguments)

    def request_rejected(self, arrival: Arrived, event: Rejected) -> None:
        """An instant of the process."""
        arguments = {"prompt_tokens": arrival.prompt_tokens, "reason": event.reason}
        instant = {"ph": "i", "s": "p", "name": f"request {arrival.s} rejected", "ts": event.ts / 1000}
        self._add(instant | {"pid": _REQUESTS_PID, "tid": 0, "args": arguments})

    def step_ended(self, step: TracedStep) -> None:
        """Its chunks, and if it is in the window the step."""
        launched, fact = step.launched, step.fact
        for chunk in step.chunks:
            arguments = {"step": launched.step, "position": chunk.position, "tokens": chunk.num_tokens}
            self._async("b", chunk.sequence, "chunk", chunk.start_ns, arguments)
            self._async("e", chunk.sequence, "chunk", chunk.end_ns, {})
        if not step.in_window:
            return
        lanes = self._step_lanes[launched.replica]
        lane = lanes.take(fact.start_ns)
        lanes.give(lane, max(fact.end_ns, fact.start_ns))
        arguments = {
            "event": launched.s,
            "rows": len(launched.decodes) + len(launched.chunks),
            "chunks": len(launched.chunks),
            "tokens": launched.num_tokens,
            "predicted_ns": launched.predicted_ns,
        }
        place = {"pid": _FIRST_REPLICA_PID + launched.replica, "tid": lane}
        self._complete(f"step {launched.step}", fact.start_ns, fact.end_ns, place, arguments)

    def attempt_ended(self, attempt: TracedAttempt) -> None:
        """A slice under the replica that is the server."""
        lanes = self._step_lanes[attempt.replica]
        lane = lanes.take(attempt.sent_ns)
        lanes.give(lane, attempt.ended_ns)
        place = {"pid": _FIRST_REPLICA_PID + attempt.replica, "tid": lane}
        arguments: dict[str, Any] = {"request": attempt.request, "index": attempt.index, "outcome": attempt.end}
        arguments |= {"output_tokens": attempt.total - attempt.before, "running": attempt.running}
        if attempt.first_ns >= 0:
            arguments["first_token_ns"] = attempt.first_ns - attempt.sent_ns
        self._complete(attempt.name, attempt.sent_ns, attempt.ended_ns, place, arguments, kind="attempt")

    def stages_ended(self, row: StepRow) -> None:
        """A slice for each stage, and before it one for the way there."""
        came_ns = row.stages[0][0]
        for stage, ((start_ns, end_ns), wait_ns) in enumerate(zip(row.stages, row.stage_waits_ns, strict=True)):
            place = {"pid": _FIRST_REPLICA_PID + row.replica, "tid": _FIRST_STAGE_TID + stage}
            if (row.replica, stage) not in self._stages:
                self._stages.add((row.replica, stage))
                self._add({"ph": "M", "name": "thread_name", **place, "args": {"name": f"stage {stage}"}})
            if came_ns + wait_ns < start_ns:
                self._complete("exchange", came_ns + wait_ns, start_ns, place, {"step": row.step})
            arguments = {"rows": row.batch_size, "tokens": row.batch_num_tokens, "waited_ns": wait_ns}
            self._complete(f"step {row.step}", start_ns, end_ns, place, arguments)
            came_ns = end_ns

    def _complete(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        place: dict[str, int],
        arguments: dict[str, Any],
        *,
        kind: str = "step",
    ) -> None:
        duration = max(end_ns - start_ns, 0) / 1000
        event = {"ph": "X", "cat": kind, "name": name, "ts": start_ns / 1000, "dur": duration}
        self._add({**event, **place, "args": arguments})

    def counter(self, replica: int, name: str, ns: int, value: int) -> None:
        """A counter of a replica has this value from now on."""
        event = {"ph": "C", "name": name, "ts": ns / 1000, "pid": _FIRST_REPLICA_PID + replica}
        self._add(event | {"args": {name: value}})

    def end(self) -> None:
        """Close the array."""
        self._write(b"\n]}\n")


def _process_name(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
