"""Times of operations in the log: one marker a step, behind the drain, and a replay that does not mind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.config import WorkerConfig
from eventlm.engine.setup import worker_setups
from eventlm.events import Event, Fact, StepCompleted, StepOps
from eventlm.replay.verify.verifier import verify
from eventlm.system.system import real_system
from eventlm.worker.protocol import StepResult
from tests.engine.engines import fake_setup
from tests.engine.metrics_oracle import fold
from tests.simulation import Simulation
from tests.workload import Chaos


class Profiled(Simulation):
    """A workload whose workers tell the times of their operations: as many ns as the step's number, and 2."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        complete = self.engine_core.complete

        def with_ops(replica: int, result: StepResult, **times: Any) -> None:
            result = structs.replace(result, ops={"attention": result.step, "mlp": 2})
            complete(replica, result, **times)

        self.engine_core.complete = with_ops  # type: ignore[method-assign]


def record(seed: int, folder: Path) -> tuple[Path, list[Event]]:
    with LogWriter(real_system(), folder, f"seed-{seed}") as writer:
        Profiled(seed, writer=writer, check_every=0, chaos=Chaos(kills=3)).run()
    with LogReader(writer.path) as reader:
        return writer.path, [line.event() for line in reader]


def test_one_marker_for_each_completed_step(tmp_path: Path) -> None:
    num_shared_drains = 0
    for seed in range(12, 22):
        path, events = record(seed, tmp_path)
        completions = {event.s: event for event in events if isinstance(event, StepCompleted)}
        markers = [event for event in events if isinstance(event, StepOps)]
        assert [marker.c for marker in markers] == list(completions)
        for marker in markers:
            fact = completions[marker.c]
            assert (marker.replica, marker.epoch, marker.step) == (fact.replica, fact.epoch, fact.step)
            assert marker.ops == {"attention": fact.step, "mlp": 2}
            assert marker.ts == fact.ts
            # Behind the whole drain: the next fact has a later time.
            later = next((event for event in events[marker.s + 1 :] if isinstance(event, Fact)), None)
            assert later is None or later.ts > marker.ts
            num_shared_drains += isinstance(events[marker.s - 1], StepOps)
        result = verify(path)
        assert (result.divergence, result.warnings, result.clean_end) == (None, [], True)
    assert num_shared_drains, "two steps never completed in one tick"


def test_the_store_sums_operations_up(tmp_path: Path) -> None:
    _, events = record(3, tmp_path)
    snapshot = fold(events)[0].snapshot()
    for index, replica in enumerate(snapshot.replicas):
        steps = [event.step for event in events if isinstance(event, StepCompleted) and event.replica == index]
        assert steps
        assert replica.op_ns == {"attention": sum(steps), "mlp": 2 * len(steps)}


def test_workers_are_asked_only_if_the_user_wants_it() -> None:
    for wanted in (False, True):
        setups = worker_setups(fake_setup(worker=WorkerConfig(profile_ops=wanted), replicas=2))
        assert [setup.profile_ops for setup in setups] == [wanted, wanted]
