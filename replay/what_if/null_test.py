"""The null test: a recorded run's workload, run through the simulator with the run's own durations, is that run.

It shows that the workload holds everything that mattered, and that the simulator adds nothing of its own. Any
difference of a simulation with fitted durations is then due to the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.core.core import Core
from eventlm.core.state.in_flight import launches_in_flight
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.errors import InvariantError
from eventlm.events import Decision, Event, Fact, StepCompleted
from eventlm.events.codec import encode_body
from eventlm.replay.rebuild import Changes, rebuild
from eventlm.replay.simulate.simulator import Simulator
from eventlm.replay.simulate.timing import RecordedTiming
from eventlm.replay.simulate.under_way import UnderWay, remaining_work
from eventlm.replay.verify.divergence import as_object, differing_fields
from eventlm.replay.workload.recorded_run import RecordedRun


class NullResult(Struct, frozen=True, kw_only=True):
    """How many decisions came out as recorded, byte for byte. difference: the first that did not, "" if all did."""

    num_decisions: int
    difference: str = ""


def null_test(
    run: RecordedRun,
    path: Path | str,
    *,
    core: Core | None = None,
    trust_local_plugins: bool = False,
) -> NullResult:
    """Repeat a run and compare; with a core between two of its drains, which goes on here, the rest from there.

    Raises UsageError for a log that does not begin with the run and a core of its beginning.
    """
    workload, under_way = run.workload, None
    if core is None:
        core = rebuild(run.header, Changes(trust_local_plugins=trust_local_plugins)).new_core()
    else:
        state = msgspec.json.decode(core.snapshot(), type=StateSnapshot)
        seqs = [request.arrival.s for request in state.requests]
        workload = remaining_work(run.all_work, seqs, core.next_seq - 1)
        under_way = UnderWay(seqs, launches_in_flight(state), run.fact_times_ns)
    first_s, end_s = core.next_seq, run.header.s + run.num_events
    # An engine's clock decides which of its timers fire together, and whether one does that was overtaken.
    facts: list[Fact] = [*run.external_facts, *run.no_ops, *run.timers, *run.answers]
    with LogReader(path) as log:
        comparison = _Comparison(log.lines_from(first_s))
        simulator = Simulator(
            run.header,
            core,
            workload,
            RecordedTiming([*run.first_steps, *run.steps]),
            external_facts=[fact for fact in facts if fact.s >= first_s],
            markers=[marker for marker in run.markers if marker.s >= first_s],
            until_s=end_s,
            subscribers=[comparison.see],
            under_way=under_way,
        )
        try:
            simulator.run()
        except _Different:
            pass
        except InvariantError as error:
            comparison.difference = str(error)
    ended_s = first_s + comparison.num_events
    if not comparison.difference and ended_s < end_s:
        comparison.difference = f"the repetition ended at event {ended_s} of {end_s}"
    return NullResult(num_decisions=comparison.num_decisions, difference=comparison.difference)


class _Different(Exception):
    """The first difference was found."""


class _Comparison:
    """Compares each event of the repetition with the line of the log at its position."""

    def __init__(self, lines: Iterator[LogLine]) -> None:
        self.num_events = 0
        self.num_decisions = 0
        self.difference = ""
        self._lines = lines

    def see(self, event: Event) -> None:
        line = next(self._lines, None)
        if line is None:
            # The log ends before all decisions of its last fact.
            raise _Different
        if encode_body(event) != line.body:
            recorded = line.event()
            before, after = as_object(_comparable(recorded)), as_object(_comparable(event))
            if before != after:
                what = "; ".join(differing_fields(before, after)) if before["t"] == after["t"] else ""
                self.difference = (
                    f"event {line.s} (line {line.number}): recorded `{before['t']}`, repeated `{after['t']}`. {what}"
                )
                raise _Different
        self.num_events += 1
        self.num_decisions += isinstance(event, Decision)


def _comparable(event: Event) -> Event:
    """Without what a repetition cannot know: the tokens of a digest, and ends of rows that no longer counted.

    The cause of a fact comes from its shell, so it is left out too.
    """
    if isinstance(event, StepCompleted):
        return structs.replace(event, digest="", ends=[], filled=[])
    return structs.replace(event, c=0) if isinstance(event, Fact) else event
