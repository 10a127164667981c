"""Metrics of requests that are forwarded to other servers, and of those servers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.config.core import Forwarding
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import (
    Arrived,
    BackendDown,
    BackendState,
    BackendUp,
    Cancelled,
    Decision,
    Event,
    Fact,
    Finished,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Header,
    Launched,
    Relayed,
    RetrySet,
    Snapshot,
    Streamed,
    Withdrawn,
)
from eventlm.metrics.aggregates import BackendMetrics, ReplicaMetrics
from eventlm.metrics.rows import RequestRow
from eventlm.metrics.store import MetricsStore
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.types import TimeWindow
from tests.core.rig import MILLISECOND
from tests.core.test_forwarding import HEDGES, Backends, hedged
from tests.engine.metrics_oracle import Rows, fold
from tests.replay.backend_runs import record_backends

NUM_RUNS = 12
LIVE = ("num_running", "num_waiting", "num_waiting_for_grammar")


class Measured(Backends):
    """Backends whose events a store has seen."""

    def __init__(self, num: int = 2, **more: Any) -> None:
        self.rows = Rows()
        self.store = MetricsStore(sink=self.rows)
        self.has_header = False
        super().__init__(num, **more)

    def feed(self, *facts: Fact, at: int = 0) -> list[Decision]:
        if not self.has_header:
            self.has_header = True
            core = self.state.replicasets[0].config
            self.store.apply(
                Header(run="r", unix_start_ns="0", code_version="0", core=core, plugins=[], predictor=[0] * 5)
            )
            self._watch()
        return super().feed(*facts, at=at)

    def _watch(self) -> None:
        """All events go to the store, in their order."""
        apply = self.core.apply

        def watched(event: Any) -> list[Decision]:
            self.store.apply(event)
            decisions = apply(event)
            for decision in decisions:
                self.store.apply(decision)
            return decisions

        self.core.apply = watched  # type: ignore[method-assign]

    def replica(self, index: int = 0) -> ReplicaMetrics:
        return self.store.snapshot().replicas[index]

    def backend(self, index: int = 0) -> BackendMetrics:
        found = self.replica(index).backend
        assert found is not None
        return found

    def row(self, request: int) -> RequestRow:
        return self.rows.requests[request, 0]


def test_the_times_of_an_answer_are_those_of_its_events() -> None:
    rig = Measured(1, limit=1)
    first, second = rig.arrive(at=10 * MILLISECOND), rig.arrive(at=20 * MILLISECOND)
    assert [getattr(rig.replica(), name) for name in LIVE] == [1, 1, 0]
    rig.feed(Streamed(rows=[(first, 0, 1, 1)]), at=50 * MILLISECOND)
    rig.feed(Streamed(rows=[(first, 0, 1, 4)]), at=70 * MILLISECOND)
    rig.feed(
        ForwardEnded(request=first, index=0, attempt=1, reason="stop", num_tokens=5, prompt_tokens=9, cached_tokens=6),
        at=90 * MILLISECOND,
    )
    row = rig.row(first)
    assert (row.request_scheduling_delay, row.prefill_e2e_time) == (0, 40 * MILLISECOND)
    assert (row.request_e2e_time, row.request_time_per_output_token) == (80 * MILLISECOND, 10 * MILLISECOND)
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens, row.reason) == (9, 6, 5, "stop")
    assert (row.request_num_preemptions, row.request_preemption_time) == (0, 0)
    # Three tokens at once are one gap; the token that only the end counted has none.
    assert [(each.num_tokens, each.gap_ns) for each in rig.rows.relayed] == [
        (1, None),
        (3, 20 * MILLISECOND),
        (1, None),
    ]
    replica = rig.replica()
    assert (replica.generation_tokens, replica.prompt_tokens, replica.cached_tokens) == (5, 9, 6)
    assert (replica.queried_tokens, replica.hit_tokens, replica.finish_reasons) == (9, 6, {"stop": 1})
    assert [getattr(replica, name) for name in LIVE] == [1, 0, 0]
    assert rig.backend().first_token.total == 40 * MILLISECOND
    rig.stream(second)
    rig.end(second)
    assert rig.row(second).request_scheduling_delay == 70 * MILLISECOND


def test_estimates_count_in_the_servers_tokens_where_it_says_half() -> None:
    rig = Measured(1)
    names = [1, 2, 3]
    rig.end(rig.arrive(prompt_tokens=13, blocks=names))
    again = rig.arrive(prompt_tokens=13, blocks=names)
    rig.end(again, prompt_tokens=26)
    assert (rig.row(again).prompt_tokens, rig.row(again).cached_tokens) == (26, 24)


def test_a_retry_waits_and_starts_again_without_a_preemption() -> None:
    rig = Measured(2)
    request = rig.arrive()
    failed_ns = rig.now_ns + MILLISECOND
    rig.fail(request, "overloaded")
    assert [sum(getattr(rig.replica(index), name) for index in (0, 1)) for name in LIVE] == [0, 1, 0]
    rig.wait()
    waited_ns = rig.now_ns - failed_ns
    rig.stream(request)
    rig.end(request)
    row = rig.row(request)
    assert (row.request_num_preemptions, row.request_num_restarts, row.request_preemption_time) == (0, 1, waited_ns)
    assert row.request_scheduling_delay == 0
    assert row.replica == 1
    lost, won = rig.backend(0), rig.backend(1)
    assert (lost.failures, lost.num_retries, lost.num_attempts, lost.num_answers) == ({"overloaded": 1}, 1, 1, 0)
    assert (won.failures, won.num_retries, won.num_attempts, won.num_answers) == ({}, 0, 1, 1)


@pytest.mark.parametrize("winner", [1, 2])
def test_of_a_hedged_sequence_the_winner_counts(winner: int) -> None:
    rig = Measured(2, forwards=HEDGES)
    request = hedged(rig)
    assert [rig.backend(index).num_running for index in (0, 1)] == [1, 1]
    assert [rig.replica(index).num_running for index in (0, 1)] == [1, 0]
    rig.stream(request, 1, attempt=winner)
    won, lost = rig.backend(winner - 1), rig.backend(2 - winner)
    assert [rig.replica(index).num_running for index in (0, 1)] == ([1, 0] if winner == 1 else [0, 1])
    assert (won.num_running, won.generation_tokens, won.num_withdrawn) == (1, 1, 0)
    assert (lost.num_running, lost.generation_tokens, lost.num_withdrawn) == (0, 0, 1)
    assert [rig.backend(index).num_hedges for index in (0, 1)] == [0, 1]
    assert sum(rig.backend(index).num_hedges_won for index in (0, 1)) == winner - 1
    rig.end(request)
    assert rig.row(request).replica == winner - 1


def test_what_a_server_says_and_whether_it_is_up() -> None:
    rig = Measured(1, limit=3)
    backend = rig.backend()
    assert (backend.name, backend.limit, rig.replica().is_up) == ("host:8000", 3, True)
    assert (backend.reported_running, backend.reported_waiting, backend.reported_kv_ppm) == (-1, -1, -1)
    rig.feed(BackendState(replica=0, epoch=1, running=5, waiting=2, kv_used_ppm=400_000))
    backend = rig.backend()
    assert (backend.reported_running, backend.reported_waiting, backend.reported_kv_ppm) == (5, 2, 400_000)
    request = rig.arrive()
    rig.feed(BackendDown(replica=0, epoch=1, reason="removed"))
    assert (rig.replica().is_up, rig.backend().down_reason, rig.backend().is_gone) == (False, "removed", False)
    assert (rig.backend().reported_running, rig.backend().num_running) == (-1, 1)
    rig.end(request)
    assert rig.backend().is_gone
    rig.feed(BackendUp(replica=0, epoch=2, name="other:8000"))
    backend = rig.backend()
    assert (backend.name, backend.num_attempts, backend.limit) == ("other:8000", 0, Forwarding().first_limit)
    # The sums of the replica go on.
    assert rig.replica().finish_reasons == {"stop": 1}


def test_a_cancelled_sequence_frees_its_server() -> None:
    rig = Measured(1)
    request = rig.arrive()
    rig.stream(request)
    rig.feed(Cancelled(request=request))
    backend = rig.backend()
    assert (backend.num_running, backend.num_answers, backend.failures) == (0, 0, {})
    assert (rig.row(request).reason, rig.row(request).output_tokens) == ("cancelled", 1)
    assert rig.replica().prompt_tokens == rig.row(request).prompt_tokens


def test_the_header_names_those_that_never_came_up() -> None:
    core = Backends(2).state.replicasets[0].config
    store = MetricsStore()
    # The third belongs to a run of which this one is a what-if.
    host = {"backends": [{"url": "http://a:1", "kind": "vllm"}, {"url": "http://b:2"}, {"url": "http://c:3"}]}
    store.apply(
        Header(run="r", unix_start_ns="0", code_version="0", core=core, plugins=[], predictor=[0] * 5, host=host)
    )
    found = [each.backend for each in store.snapshot().replicas]
    assert [(each.name, each.kind) for each in found if each] == [("a:1", "vllm"), ("b:2", "")]


def test_one_that_is_removed_before_it_was_up_is_none() -> None:
    core = Backends(2).state.replicasets[0].config
    store = MetricsStore()
    store.apply(Header(run="r", unix_start_ns="0", code_version="0", core=core, plugins=[], predictor=[0] * 5))
    store.apply(BackendDown(replica=1, epoch=1, reason="removed"))
    assert [each.backend for each in store.snapshot().replicas] == [None, None]


# --- random runs


@pytest.fixture(scope="module", params=range(NUM_RUNS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_backends(tmp_path_factory.mktemp("run"), request.param, segment_bytes=20_000)


def read(folder: Path) -> list[Event]:
    with LogReader(folder) as reader:
        return [line.event() for line in reader]


def test_sums_are_those_of_the_events(run: Path) -> None:
    """Counted here by the definition of each, over the whole list of events."""
    events = read(run)
    store, rows = fold(events)
    arrivals = {event.s: event for event in events if isinstance(event, Arrived)}
    forwards: dict[tuple[int, int], list[Forwarded]] = {}
    for event in events:
        if isinstance(event, Forwarded):
            forwards.setdefault((event.request, event.index), []).append(event)
    shown: dict[tuple[int, int], list[tuple[int, int]]] = {}
    streamed: Streamed | None = None
    for event in events:
        if isinstance(event, Streamed):
            streamed = event
        elif isinstance(event, Relayed) and streamed is not None:
            kept = [row for number, row in enumerate(streamed.rows) if number not in event.dropped]
            for request, index, _, total in kept:
                shown.setdefault((request, index), []).append((event.ts, total))
    ends = {(event.request, event.index): event for event in events if isinstance(event, Finished)}
    assert {identity for identity in ends if identity in rows.requests} == set(ends)
    sent = [rows.requests[identity] for identity in forwards]
    assert sent
    for row in sent:
        identity = row.request, row.index
        arrival, tries = arrivals[row.request], forwards[identity]
        assert row.request_scheduling_delay == tries[0].ts - arrival.ts
        assert row.request_num_preemptions == 0
        if arrival.scheduling.kind == "generate":
            assert row.output_tokens == ends[identity].position
            if identity in shown:
                assert row.prefill_e2e_time == shown[identity][0][0] - (arrival.scheduling.received_ns or arrival.ts)
    kinds = Counter(type(event) for event in events)
    backends = [each.backend for each in store.snapshot().replicas if each.backend]
    assert sum(each.num_attempts for each in backends) == kinds[Forwarded]
    assert sum(each.num_retries for each in backends) == kinds[RetrySet]
    assert sum(each.num_withdrawn for each in backends) == kinds[Withdrawn]
    assert sum(sum(each.failures.values()) for each in backends) <= kinds[ForwardFailed]
    assert sum(each.num_hedges for each in backends) == sum(each.hedge for tries in forwards.values() for each in tries)
    assert sum(each.generation_tokens for each in backends) == sum(row.output_tokens for row in sent)
    assert not any(each.num_running for each in backends)
    for replica in store.snapshot().replicas:
        assert [getattr(replica, name) for name in LIVE] == [0, 0, 0]
    assert store.num_live == 0


def test_a_window_of_everything_is_the_whole(run: Path) -> None:
    whole, found = trace_stats(run), trace_stats(run, window=TimeWindow(0, None))
    assert found.distributions == whole.distributions
    for mine, its in zip(found.snapshot.replicas, whole.snapshot.replicas, strict=True):
        assert mine.generation_tokens == its.generation_tokens
        assert mine.backend == its.backend


def test_it_goes_on_from_a_snapshot(run: Path) -> None:
    """Gauges are those of a store that has seen everything, and so are the rows of what arrives later."""
    events = read(run)
    _, all_rows = fold(events)
    header = events[0]
    assert isinstance(header, Header)
    for place, event in enumerate(events):
        if not isinstance(event, Snapshot):
            continue
        taken = msgspec.json.decode(event.state, type=StateSnapshot)
        whole = MetricsStore()
        for each in events[:place]:
            whole.apply(each)
        rows = Rows()
        store = MetricsStore(sink=rows)
        in_flight = {(replica, step.launch_seq) for replica, each in enumerate(taken.replicas) for step in each.steps}
        launches = [each for each in events if isinstance(each, Launched) and (each.replica, each.s) in in_flight]
        store.take_up(structs.replace(header), taken, launches)
        for mine, its in zip(store.snapshot().replicas, whole.snapshot().replicas, strict=True):
            assert [getattr(mine, name) for name in LIVE] == [getattr(its, name) for name in LIVE]
            if its.backend is not None and its.backend.num_attempts:
                assert mine.backend is not None
                assert mine.backend.num_running == its.backend.num_running
        for each in events[place:]:
            store.apply(each)
        assert store.num_live == 0
        for identity, row in rows.requests.items():
            if row.arrived_ns > taken.now_ns:
                assert row == all_rows.requests[identity]
