"""The loop: what it stamps, when it marks, which timers fire; and nothing else stamps events."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.engine.core_loop import CoreLoop, Shell
from eventlm.engine.setup import make_header
from eventlm.events import Arrived, CacheFlushed, Checkpoint, Event, Fact, Resumed, TimerDue, WorkerUp
from eventlm.replay.simulate.clock import VirtualClock
from eventlm.worker.protocol import WorkerReady
from tests.made_requests import make_arrival

from .test_engine_core import COEFFICIENTS, fake_setup

ROOT = Path(__file__).parents[2]
#: The loop, and who makes what stood in a log again, at its own place: a digest, and a plan that is asked about. The
#: core stamps its own decisions.
STAMPING = {
    "eventlm/engine/core_loop.py",
    "replay/explain/explainer.py",
    "replay/index/worker.py",
    "replay/verify/verifier.py",
}


class Rig:
    """A loop whose events are kept."""

    def __init__(self, **options: Any) -> None:
        setup = fake_setup()
        self.clock = VirtualClock()
        self.events: list[Event] = []
        self.workers: list[int] = []
        self.num_drained = 0
        core = Core(setup.core, setup.plugins, Predictor.from_coefficients(COEFFICIENTS))
        shell = Shell(
            fact=self.events.append,
            worker_changed=lambda index, decisions: self.workers.append(index),
            decision=self.events.append,
            marker=self.events.append,
            drained=self._drained,
        )
        self.loop = CoreLoop(core, self.clock, shell, **options)
        ready = WorkerReady(epoch=1, pid=1)
        self.loop.mark(make_header(setup, "run", 1, COEFFICIENTS, "config", ready, unix_start_ns=0))

    def _drained(self) -> None:
        self.num_drained += 1

    def facts(self) -> list[Fact]:
        return [event for event in self.events if isinstance(event, Fact)]

    def run(self) -> None:
        while self.clock.has_more:
            self.loop.drain(self.clock.advance())


def arrival(**fields: Any) -> Arrived:
    return make_arrival(prompt_tokens=5, max_tokens=3, **fields)


def test_facts_of_a_tick_share_its_time_and_the_last_one_bears_the_mark() -> None:
    rig = Rig()
    rig.loop.put_fact(Resumed())
    rig.loop.put(lambda seq, ts: [Resumed(), CacheFlushed()])
    rig.loop.drain(500)
    rig.loop.put_fact(WorkerUp(replica=0, epoch=1))
    rig.loop.drain(500)
    assert [(fact.ts, fact.p) for fact in rig.facts()] == [(500, 0), (500, 0), (500, 1), (501, 1)]
    assert [event.s for event in rig.events] == list(range(len(rig.events)))
    assert (rig.workers, rig.num_drained) == ([0], 2)


def test_facts_are_made_when_those_before_them_have_been_applied() -> None:
    rig = Rig()
    made: list[tuple[int, int]] = []

    def make(seq: int, ts: int) -> list[Fact]:
        made.append((seq, ts))
        return [Resumed()]

    rig.loop.put_fact(arrival())
    rig.loop.put(make)
    rig.loop.drain(7)
    arrived, *_, resumed = rig.facts()
    assert made == [(resumed.s, 7)]
    assert resumed.s > arrived.s + 1


def test_an_empty_drain_is_no_tick() -> None:
    rig = Rig(checkpoint_events=1)
    rig.loop.drain(500)
    assert len(rig.events) == 1
    assert rig.num_drained == 0


def test_digests_are_marked_between_ticks() -> None:
    rig = Rig(checkpoint_events=4)
    for now_ns in range(1, 10):
        rig.loop.put_fact(Resumed())
        rig.loop.drain(now_ns)
    indices = [event.s for event in rig.events if isinstance(event, Checkpoint)]
    assert indices == [4, 9]


def test_the_earliest_timer_fires_once() -> None:
    rig = Rig()
    for deadline_ns in (900, 300, 600):
        rig.loop.put_fact(arrival(deadline_ns=deadline_ns, drop_if_late=True))
        rig.loop.drain(10)
    rig.run()
    assert [event.due_ns for event in rig.events if isinstance(event, TimerDue)] == [311, 612, 910]
    assert rig.loop.core.next_timer_ns is None


def test_a_timer_that_comes_too_early_is_set_again() -> None:
    rig = Rig()
    rig.loop.put_fact(arrival(deadline_ns=300, drop_if_late=True))
    rig.loop.drain(10)
    due_ns = rig.loop.core.next_timer_ns
    assert due_ns == 310
    early, calls = VirtualClock(), []
    rig.loop._clock = early
    early.at(200, lambda: calls.append(rig.loop._fire(310)))
    early.advance()
    assert not rig.loop.has_pending
    assert early.advance() == 310
    assert rig.loop.has_pending


def test_a_disarmed_timer_does_not_fire_nor_do_those_of_a_repetition() -> None:
    for options in ({}, {"fires_timers": False}):
        rig = Rig(**options)
        rig.loop.put_fact(arrival(deadline_ns=300, drop_if_late=True))
        rig.loop.drain(10)
        rig.loop.disarm()
        rig.run()
        assert not [event for event in rig.events if isinstance(event, TimerDue)]


#: What else has an `s` and a `ts`.
_NO_EVENTS = frozenset({"Finding", "NextStep", "Stop", "sample_metrics"})


def test_only_the_loop_stamps_events() -> None:
    found = set()
    for folder in ("eventlm", "replay", "policies"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "ts=" not in text:
                continue
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            if any(_stamps(call) for call in calls):
                found.add(path.resolve().relative_to(ROOT).as_posix())
    assert {path for path in found if not path.startswith("eventlm/core/")} == STAMPING


def _stamps(call: ast.Call) -> bool:
    """Whether it gives an event a place and a time. Other things may have both: a position of the debugger, say."""
    fields = {keyword.arg: keyword.value for keyword in call.keywords}
    if "s" not in fields or "ts" not in fields or isinstance(fields["s"], ast.Constant):
        return False
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return called not in _NO_EVENTS
