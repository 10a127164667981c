"""Runs with a token log that are executed again, by fake workers in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.events import Header, Launched
from eventlm.replay.execute.execution import ExecuteResult, execute
from eventlm.system.system import real_system
from eventlm.worker.fake.runner import FakeRunner
from eventlm.worker.protocol import FAKE_MODEL, StepPayload, StepResult, WorkerSetup, decode_to_worker, encode
from tests.simulation import DIGEST_KEY, Simulation
from tests.workload import Chaos


class FakeWorkers:
    """`Workers` without processes; they hear what went over the wire. Steps are kept in the order of their runs."""

    def __init__(self, setups: Sequence[WorkerSetup], header: Header) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.losses: list[int] = []
        self._setups = [setups[number] for number in header.sets_of_replicas()]
        self._runners: dict[tuple[int, int], FakeRunner] = {}

    async def run(self, launched: Launched, body: bytes, payload: StepPayload) -> StepResult:
        setup = self._setups[launched.replica]
        key = (launched.replica, launched.epoch)
        if key not in self._runners:
            self._runners[key] = FakeRunner(
                setup.fake,
                epoch=launched.epoch,
                block_size=setup.block_size,
                num_blocks=setup.num_blocks * setup.layout.groups,
                state_slots=setup.state_slots,
            )
        heard = decode_to_worker(encode(payload))
        assert isinstance(heard, StepPayload)
        done = self._runners[key].execute(launched, heard)
        self.steps.append((*key, launched.step))
        return StepResult(
            epoch=launched.epoch, step=launched.step, start_ns=0, end_ns=0, tokens=done.tokens, ends=done.ends
        )

    async def lose(self, replica: int) -> None:
        self.losses.append(replica)
        self._runners = {key: runner for key, runner in self._runners.items() if key[0] != replica}

    def host_differences(self) -> list[str]:
        return []

    async def close(self) -> None:
        """Nothing to stop."""


def record_with_tokens(folder: Path, seed: int, *, run: str = "", segment_bytes: int = 0, **options: Any) -> Path:
    """Record the workload of a seed with its token log; the run's folder."""
    with LogWriter(
        real_system(), folder, run or f"seed-{seed}", segment_bytes=segment_bytes, digest_key=DIGEST_KEY
    ) as writer:
        options = {"chaos": Chaos(recoveries=seed % 3)} | options
        Simulation(seed, writer=writer, records_tokens=True, check_every=0, **options).run()
    return writer.run_folder


def execute_fake(path: Path, **options: Any) -> ExecuteResult:
    """Execute a run again in this process."""
    with LogReader(path) as log:
        others = [FAKE_MODEL] * (len(log.header.sets) - 1)
    return execute(path, model=FAKE_MODEL, others=others, make_workers=FakeWorkers, **options)
