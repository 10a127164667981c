"""What simulated servers do with what they are sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eventlm.events import BackendState, Fact, Forwarded, ForwardEnded, ForwardFailed, Relayed, Streamed, Withdrawn
from eventlm.replay.cost.backend_model import BackendCost, FailureRate
from eventlm.replay.simulate.backends import ModelledBackend, SimulatedBackends, answer_of
from eventlm.replay.simulate.clock import VirtualClock
from eventlm.replay.workload.workload import SequenceOutput, TextEnd, WorkloadRequest
from eventlm.types import SequenceId
from tests.made_requests import make_arrival

COST = BackendCost(first_ns=100, prefill_ps=1000, token_ps=10_000, end_ns=7)


class Agenda:
    """Virtual time in which nothing else happens. told: the facts with their times."""

    def __init__(self, *costs: BackendCost) -> None:
        self.told: list[tuple[int, Fact]] = []
        self.clock = VirtualClock()
        self.backends = SimulatedBackends([ModelledBackend(cost) for cost in costs], self)

    def now_ns(self) -> int:
        return self.clock.now_ns()

    def at(self, due_ns: int, action: Callable[[], None]) -> None:
        self.clock.at(due_ns, action)

    def put(self, fact: Fact) -> None:
        self.told.append((self.now_ns(), fact))

    def send(
        self, request: int, num_tokens: int, *, prompt: int = 50, cached: int = 0, attempt: int = 1, replica: int = 0
    ) -> None:
        """Forward request number `request`, which has so many tokens of output."""
        forwarded = Forwarded(
            request=request, index=0, replica=replica, attempt=attempt, cached_tokens=cached, running=1, limit=9
        )
        self.backends.forward(forwarded, workload_request(num_tokens, prompt=prompt), request)

    def run(self) -> list[tuple[int, Fact]]:
        """To the end."""
        while self.clock.has_more:
            self.clock.advance()
        return self.told

    def ends(self) -> dict[int, int]:
        """When each request ended."""
        return {fact.request: ns for ns, fact in self.run() if isinstance(fact, ForwardEnded)}


def workload_request(length: int, *, prompt: int = 50, **output: object) -> WorkloadRequest:
    made = SequenceOutput(**{"worker_end": length, "num_tokens": length, "reason": "stop"} | output)  # type: ignore[arg-type]
    return WorkloadRequest(arrival=make_arrival(prompt_tokens=prompt, max_tokens=30), arrival_ns=0, outputs=[made])


def test_an_answer_begins_goes_on_and_ends() -> None:
    agenda = Agenda(COST)
    agenda.send(1, 4, prompt=50, cached=20)
    told = agenda.run()
    assert [(ns, fact.rows) for ns, fact in told if isinstance(fact, Streamed)] == [
        (130, [(1, 0, 1, 1)]),
        (140, [(1, 0, 1, 2)]),
        (150, [(1, 0, 1, 3)]),
        (160, [(1, 0, 1, 4)]),
    ]
    ns, end = told[-1]
    assert isinstance(end, ForwardEnded)
    assert (ns, end.reason, end.num_tokens) == (167, "stop", 4)


def test_prompts_wait_for_each_other() -> None:
    agenda = Agenda(COST)
    for request in (1, 2, 3):
        agenda.send(request, 1)
    assert agenda.ends() == {1: 157, 2: 207, 3: 257}
    aside = Agenda(BackendCost(first_ns=100, prefill_ps=1000, queued_ppm=0))
    aside.send(1, 1)
    aside.send(2, 1)
    assert aside.ends() == {1: 150, 2: 150}


def test_answers_slow_each_other_down_and_stand_still_for_prompts() -> None:
    agenda = Agenda(BackendCost(first_ns=100, token_ps=10_000, token_running_ps=10_000, stall_ps=1000))
    agenda.send(1, 11, prompt=0)
    agenda.clock.at(150, lambda: agenda.send(2, 100, prompt=30))
    # Five tokens by 150; 30 ns for the prompt; then alone until 250, and the rest is with the other.
    ends = agenda.ends()
    assert 230 <= ends[1] <= 232
    assert ends[2] > 250 + 98 * 10


def test_requests_beyond_the_slots_wait_there() -> None:
    agenda = Agenda(BackendCost(first_ns=100, token_ps=10_000, slots=1))
    agenda.send(1, 3)
    agenda.send(2, 3)
    state = agenda.backends.measured(BackendState(replica=0, epoch=1, running=0, waiting=0, kv_used_ppm=5))
    assert (state.running, state.waiting, state.kv_used_ppm) == (1, 1, -1)
    assert agenda.backends.measured(BackendState(replica=0, epoch=1)).running == -1
    assert agenda.ends() == {1: 120, 2: 240}


def test_what_nobody_wants_makes_room() -> None:
    agenda = Agenda(BackendCost(first_ns=100, token_ps=10_000, slots=1))
    for request in (1, 2, 3):
        agenda.send(request, 3)
    agenda.backends.finish(SequenceId(1, 0))
    agenda.backends.withdraw(Withdrawn(request=2, index=0, replica=0, attempt=1))
    assert agenda.ends() == {3: 120}


def test_the_next_attempt_goes_on_from_what_was_shown() -> None:
    agenda = Agenda(COST, COST)
    agenda.backends.stream(Streamed(rows=[(1, 0, 1, 3), (2, 0, 1, 1)]))
    shown = list(agenda.backends.relay(Relayed(num_tokens=3, dropped=[1])))
    assert shown == [(SequenceId(1, 0), 0, 3)]
    agenda.send(1, 5, attempt=2, replica=1, prompt=50)
    told = [fact for _, fact in agenda.run() if isinstance(fact, Streamed)]
    assert [fact.rows for fact in told] == [[(1, 0, 2, 4)], [(1, 0, 2, 5)]]


@pytest.mark.parametrize("begun_ppm", [0, 1_000_000])
def test_the_same_attempts_fail_everywhere(begun_ppm: int) -> None:
    failing = FailureRate(kind="broken", rate_ppm=300_000, delay_ns=9, begun_ppm=begun_ppm, can_continue=True)
    failed = []
    for slower in (0, 5_000):
        agenda = Agenda(BackendCost(first_ns=100 + slower, token_ps=10_000, failures=[failing]))
        for request in range(200):
            agenda.send(request, 8)
        told = agenda.run()
        failed.append({fact.request for _, fact in told if isinstance(fact, ForwardFailed)})
        assert len(failed[-1] | {fact.request for _, fact in told if isinstance(fact, ForwardEnded)}) == 200
        assert bool(failed[-1] & {row[0] for _, fact in told if isinstance(fact, Streamed) for row in fact.rows}) == (
            begun_ppm > 0
        )
    assert failed[0] == failed[1]
    assert 40 <= len(failed[0]) <= 80


def test_noise_is_drawn_from_what_was_measured() -> None:
    agenda = Agenda(BackendCost(first_ns=100, queued_ppm=0, first_ratios_ppm=[500_000, 2_000_000]))
    for request in range(40):
        agenda.send(request, 1)
    assert set(agenda.ends().values()) == {50, 200}


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ({}, (8, "stop")),
        ({"worker_end": 1 << 62}, (30, "length")),
        ({"text_end": TextEnd(position=5, reason="tool_calls", delay_ns=1)}, (5, "tool_calls")),
        # It was cut short, and another one's length was drawn.
        ({"num_tokens": 3, "reason": "cancelled"}, (8, "eos")),
    ],
)
def test_an_answer_is_as_long_as_the_workload_says(output: dict[str, object], answer: tuple[int, str]) -> None:
    assert answer_of(workload_request(8, **output), 0) == answer
