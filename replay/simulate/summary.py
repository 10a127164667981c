"""The figures of a simulation, which `eventlm simulate` prints and a sweep keeps for each cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct, structs

from eventlm.events import Header
from eventlm.metrics.trace_metrics import Distribution
from eventlm.replay.outcome import LATENCIES, RunOutcome, SequenceOutcome

#: Boundaries of the classes of prompt lengths, in tokens.
CLASS_EDGES = (256, 1024, 4096, 16_384, 65_536)


class ClassSummary(Struct, frozen=True, kw_only=True):
    """Sequences with prompts of `min_tokens` to `max_tokens` tokens; None: no limit."""

    min_tokens: int
    max_tokens: int | None
    num_sequences: int
    latencies: dict[str, Distribution]
    objectives_met_ppm: int | None
    fluidity_ppm: int | None

    @property
    def label(self) -> str:
        """`1,025 to 4,096`."""
        if self.max_tokens is None:
            return f"{self.min_tokens:,} or more"
        return f"{self.min_tokens:,} to {self.max_tokens:,}"


class ReplicasetSummary(Struct, frozen=True, kw_only=True):
    """The part of a replicaset in a simulation. Shares are in parts per million."""

    name: str
    model: str
    num_replicas: int
    num_complete: int
    num_rejected: int
    busy_ppm: int
    output_tokens_per_second: float
    latencies: dict[str, Distribution]
    objectives_met_ppm: int | None


class SimulationSummary(Struct, frozen=True, kw_only=True):
    """A simulation. Latencies in ns by the names of `eventlm.replay.outcome.LATENCIES`, if any sequence has them.

    num_unserved: requests that never arrived because the turn before was rejected. num_cut_short: sequences that did
    not run to their end. duration_ns: simulated, from the first arrival to the last end; wall_ns: of the simulation
    itself. Shares are in parts per million, None if they do not apply. replicasets: empty where there is one.
    """

    num_requests: int
    reject_reasons: dict[str, int]
    num_unserved: int
    num_complete: int
    num_cut_short: int
    duration_ns: int
    num_replicas: int
    num_steps: int
    busy_ppm: int
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    num_preemptions: int
    hit_ppm: int | None
    deadlines_met_ppm: int | None
    objectives_met_ppm: int | None
    fluidity_ppm: int | None
    latencies: dict[str, Distribution]
    classes: list[ClassSummary]
    wall_ns: int
    replicasets: list[ReplicasetSummary] = []

    @property
    def num_rejected(self) -> int:
        """Requests that were rejected."""
        return sum(self.reject_reasons.values())

    @property
    def steps_per_second(self) -> float:
        """Speed of the simulation itself."""
        return self.num_steps * 1e9 / self.wall_ns if self.wall_ns else 0.0


def summarize(outcome: RunOutcome, *, header: Header, num_unserved: int, wall_ns: int) -> SimulationSummary:
    """The figures of a run."""
    sequences, num_replicas = outcome.sequences, header.num_replicas
    num_complete = sum(found.is_complete for found in sequences)
    available_ns = outcome.duration_ns * num_replicas
    return SimulationSummary(
        num_requests=outcome.num_requests,
        reject_reasons=outcome.reject_reasons,
        num_unserved=num_unserved,
        num_complete=num_complete,
        num_cut_short=len(sequences) - num_complete,
        duration_ns=outcome.duration_ns,
        num_replicas=num_replicas,
        num_steps=outcome.num_steps,
        busy_ppm=outcome.busy_ns * 1_000_000 // available_ns if available_ns else 0,
        prompt_tokens=sum(found.prompt_tokens for found in sequences),
        output_tokens=outcome.output_tokens,
        requests_per_second=outcome.requests_per_second,
        output_tokens_per_second=outcome.output_tokens_per_second,
        num_preemptions=outcome.num_preemptions,
        hit_ppm=outcome.hit_tokens * 1_000_000 // outcome.queried_tokens if outcome.queried_tokens else None,
        deadlines_met_ppm=outcome.deadlines_met_ppm,
        objectives_met_ppm=outcome.objectives_met_ppm,
        fluidity_ppm=outcome.fluidity_ppm,
        latencies=_latencies(outcome, sequences),
        classes=list(_classes(outcome)),
        wall_ns=wall_ns,
        replicasets=list(_replicasets(outcome, header)) if len(header.sets) > 1 else [],
    )


def _replicasets(outcome: RunOutcome, header: Header) -> Iterator[ReplicasetSummary]:
    sets = header.sets_of_replicas()
    for number, each in enumerate(header.sets):
        found = outcome.of_replicaset(number)
        busy_ns = sum(ns for ns, own in zip(outcome.busy_ns_of_replicas, sets, strict=True) if own == number)
        available_ns = outcome.duration_ns * each.core.num_replicas
        yield ReplicasetSummary(
            name=each.name,
            model=each.core.models[0],
            num_replicas=each.core.num_replicas,
            num_complete=sum(sequence.is_complete for sequence in found.sequences),
            num_rejected=len(found.rejections),
            busy_ppm=busy_ns * 1_000_000 // available_ns if available_ns else 0,
            output_tokens_per_second=found.output_tokens_per_second,
            latencies=_latencies(found, found.sequences),
            objectives_met_ppm=found.objectives_met_ppm,
        )


def _latencies(outcome: RunOutcome, sequences: Sequence[SequenceOutcome]) -> dict[str, Distribution]:
    found = {name: outcome.latency(name, sequences) for name in LATENCIES}
    return {name: values for name, values in found.items() if values is not None}


def _classes(outcome: RunOutcome) -> list[ClassSummary]:
    found = []
    lower = 1
    for upper in (*CLASS_EDGES, None):
        members = [
            s for s in outcome.sequences if lower <= s.prompt_tokens and (upper is None or s.prompt_tokens <= upper)
        ]
        if members:
            rejections = [
                each for each in outcome.rejections if lower <= each.prompt_tokens <= (upper or each.prompt_tokens)
            ]
            of_class = structs.replace(outcome, sequences=members, rejections=rejections)
            found.append(
                ClassSummary(
                    min_tokens=lower,
                    max_tokens=upper,
                    num_sequences=len(members),
                    latencies=_latencies(outcome, members),
                    objectives_met_ppm=of_class.objectives_met_ppm,
                    fluidity_ppm=of_class.fluidity_ppm,
                )
            )
        lower = (upper or 0) + 1
    return found
