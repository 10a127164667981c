"""The fake worker in real time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from eventlm.core.predictor import StepShape
from eventlm.core.shards import deal_out
from eventlm.events import Launched
from eventlm.system.clock import Clock
from eventlm.system.system import System
from eventlm.worker.fake.rank import FakeNotice, FakeWait
from eventlm.worker.fake.runner import FakeDeath, FakeHang, FakeRunner
from eventlm.worker.fake.tokens import FakeParameters
from eventlm.worker.protocol import FAKE_MODEL, StepOutput, StepPayload, StepSample, WorkerSetup

#: How often a step that is held up looks whether it still is.
_POLL_NS = 5_000_000


class TimedFakeStep(NamedTuple):
    """A launch that the fake device computes while the worker goes on."""

    output: StepOutput
    times_ns: tuple[int, int]
    clock: Clock

    def is_done(self) -> bool:
        """Whether its time is over."""
        return self.clock.monotonic_ns() >= self.due_ns

    @property
    def due_ns(self) -> int:
        """Its end."""
        return self.times_ns[1]

    def finish(self) -> StepOutput:
        """What it gave."""
        return self.output


class HeldFakeStep(NamedTuple):
    """A launch that ends in an error once `may_end`, which may be never."""

    may_end: Callable[[], bool]
    error: Exception
    clock: Clock
    since_ns: int
    times_ns: tuple[int, int] = (0, 0)

    def is_done(self) -> bool:
        """Whether it may end."""
        return self.may_end()

    @property
    def due_ns(self) -> int:
        """A moment from now, and later the longer it has lasted."""
        now_ns = self.clock.monotonic_ns()
        return now_ns + max(_POLL_NS, (now_ns - self.since_ns) // 8)

    def finish(self) -> StepOutput:
        """Raises its error."""
        raise self.error


class FakeModel:
    """The fake worker in real time: a device that computes one launch after the other, each as long as it says, and
    dies when it is drawn to.
    """

    def __init__(self, setup: WorkerSetup, system: System) -> None:
        self._clock, self._processes = system.clock, system.processes
        self._profile_ops = setup.profile_ops
        self._runner = FakeRunner(
            setup.fake,
            epoch=setup.epoch,
            block_size=setup.block_size,
            num_blocks=setup.num_blocks * setup.layout.groups,
            state_slots=setup.state_slots,
            layout=setup.layout,
            rank=setup.rank,
        )
        self.num_blocks = setup.num_blocks
        self.notes: list[str] = []
        self.waits_for_peers = False
        shared = setup.peers.shared_memory
        self._board = system.shared_folders.board(shared) if shared else None
        #: The launch that is never computed, nor are those that come behind it.
        self._held: HeldFakeStep | None = None
        #: When the device of each stage will have done all that it was given.
        self._free_ns = [0] * setup.layout.stages

    def start(self, launch: Launched, payload: StepPayload) -> TimedFakeStep | HeldFakeStep:
        """Queued after what is under way. Every stage takes an equal part of each operation's time."""
        if self._held is not None:
            return self._held
        begun_ns = self._clock.monotonic_ns()
        try:
            step = self._runner.execute(launch, payload)
        except FakeDeath as death:
            self._processes.exit(1, f"fake worker: {death}")
        except (FakeHang, FakeWait, FakeNotice) as fault:
            return self._hold(launch.step, fault)
        num_stages = len(self._free_ns)
        shares = {name: [len(share) for share in deal_out(time_ns, num_stages)] for name, time_ns in step.ops.items()}
        stages: list[tuple[int, int]] = []
        for stage, share in enumerate(zip(*shares.values(), strict=True)):
            start_ns = max(begun_ns, self._free_ns[stage], stages[-1][1] if stages else 0)
            self._free_ns[stage] = start_ns + sum(share)
            stages.append((start_ns, self._free_ns[stage]))
        times_ns = (stages[0][0], stages[-1][1])
        # The rank that answers is in the last stage.
        ops = {name: share[-1] for name, share in shares.items()} if self._profile_ops else {}
        return TimedFakeStep(step._replace(ops=ops, stages=stages if num_stages > 1 else []), times_ns, self._clock)

    def _hold(self, step: int, fault: Exception) -> HeldFakeStep:
        board, other = self._board, fault.rank if isinstance(fault, FakeNotice) else None

        def may_end() -> bool:
            # Nobody can notice it before the other rank has come there.
            return other is not None and (board is None or board.read(other) >= step)

        self.waits_for_peers = not isinstance(fault, FakeHang)
        self._held = HeldFakeStep(may_end, fault, self._clock, self._clock.monotonic_ns())
        return self._held

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Over the fake model's bytes."""
        from eventlm.worker.fake.grammar import fake_compiler

        return fake_compiler().prepare(grammar)

    def warm_up(self) -> list[StepSample]:
        """The formula's own values at a few points."""
        return fake_samples(self._runner.parameters, len(self._free_ns))

    def work_ahead(self) -> bool:
        """There is nothing to do."""
        return False

    def describe(self) -> tuple[str, dict[str, Any]]:
        """There is no model."""
        return FAKE_MODEL, {"device": "none"}


def fake_samples(parameters: FakeParameters, num_stages: int = 1) -> list[StepSample]:
    """What a warm-up of the fake worker would measure: the time of one stage."""
    shapes = [(1, 0, 1), (256, 0, 256), (0, 1, 64), (0, 64, 64), (0, 64, 65_536), (1024, 0, 1024)]
    return [
        StepSample(
            shape=StepShape(prefill, decodes, context, chunk_context=prefill * (prefill // 2)),
            duration_ns=(
                parameters.base_ns
                + parameters.prefill_token_ns * prefill
                + parameters.decode_ns * decodes
                + parameters.context_token_ns * context
            )
            // num_stages,
        )
        for prefill, decodes, context in shapes
    ]
