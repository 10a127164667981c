"""How long the engine waits while a segment of its trace begins: the snapshot of a core, and its way to the disk.

    python benchmarks/core/snapshot.py [--blocks 65000] [--prompt-blocks 6] [--rounds 20] [--folder DIR]

A core with one replica, all of whose blocks hold something, and live sequences of which 256 run and the others wait.
The pause is the time from the end of a drain to the new segment being the run's `trace.jsonl` and the oldest one being
removed. Beside it stand the snapshot's share, its size, and how long a core takes to come back from it (which only a
reader does).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Raw, structs

from eventlm.bus.log_writer import LogWriter
from eventlm.config import CoreConfig
from eventlm.core.core import Core
from eventlm.core.plugin import Batcher, Policy, Router
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.core.state.replicaset import Plugins
from eventlm.core.state.validate import validate
from eventlm.events import Arrived, Decision, Header, Launched, Snapshot, StepCompleted, WorkerUp
from eventlm.events.codec import encode_body
from eventlm.policies.fcfs import Fcfs
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system

BLOCK_SIZE = 16
NUM_RUNNING = 256


def make_core(num_blocks: int) -> Core:
    """A core with nothing in it."""
    config = CoreConfig(
        models=["m"],
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=4096,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=8192,
        max_queue_len=1 << 30,
    )
    plugins: dict[str, Policy] = {"fcfs": Fcfs()}
    return Core(
        config,
        Plugins(policies=plugins, policy="fcfs", batcher=Batcher(), router=Router()),
        Predictor.from_coefficients(DEFAULT_COEFFICIENTS),
    )


class Feeder:
    """Feeds facts, one a drain, and completes every step at once."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.next_name = 1
        self.launched: list[Launched] = []
        core.apply(WorkerUp(s=0, ts=1, replica=0, epoch=1, p=1))

    def arrive(self, num_requests: int, *, prompt_blocks: int, max_tokens: int) -> None:
        """Requests with prompts of their own."""
        for _ in range(num_requests):
            names = list(range(self.next_name, self.next_name + prompt_blocks))
            self.next_name += prompt_blocks
            s, ts = self.core.next_seq, self.core.state.now_ns + 1
            arrived = Arrived(
                s=s,
                ts=ts,
                prompt_tokens=prompt_blocks * BLOCK_SIZE,
                blocks=names,
                max_tokens=max_tokens,
                p=1,
                scheduling=SchedulingParams(model="m"),
            )
            self._take(self.core.apply(arrived))

    def complete(self) -> None:
        """Complete the oldest step."""
        launched = self.launched.pop(0)
        done = StepCompleted(
            s=self.core.next_seq,
            ts=self.core.state.now_ns + 1,
            c=launched.s,
            replica=0,
            epoch=1,
            step=launched.step,
            start_ns=0,
            end_ns=0,
            produced=[1] * len(launched.decodes) + [chunk[4] for chunk in launched.chunks],
            p=1,
        )
        self._take(self.core.apply(done))

    def _take(self, decisions: list[Decision]) -> None:
        self.launched += [decision for decision in decisions if isinstance(decision, Launched)]


def fill(num_blocks: int, num_sequences: int, prompt_blocks: int) -> Core:
    """A pool full of idle blocks, and live sequences on top."""
    core = make_core(num_blocks)
    feeder = Feeder(core)
    for _ in range(num_blocks // (100 * 100) + 1):
        feeder.arrive(100, prompt_blocks=100, max_tokens=1)
        while feeder.launched:
            feeder.complete()
    feeder.arrive(num_sequences, prompt_blocks=prompt_blocks, max_tokens=1000)
    for _ in range(20 if num_sequences else 0):
        feeder.complete()
    validate(core.state)
    return core


def turner(core: Core, folder: Path) -> Callable[[], object]:
    """Starts one segment after the other, and keeps one; the folder goes with what is returned."""
    index = tempfile.TemporaryDirectory(dir=folder)
    writer = LogWriter(real_system(), index.name, "run", segment_bytes=1, keep_bytes=1)
    header = Header(
        run="run",
        unix_start_ns="0",
        code_version="0",
        core=core.state.replicasets[0].config,
        plugins=[],
        predictor=[0] * 5,
    )

    def lines() -> Iterator[bytes]:
        yield encode_body(structs.replace(header, s=writer.next_s, previous_h=writer.previous_h))
        yield encode_body(Snapshot(s=writer.next_s, state=Raw(core.snapshot())))

    def turn() -> object:
        assert Path(index.name).is_dir()
        assert writer.start_segment(writer.next_s, lines())
        return writer

    return turn


def milliseconds(work: Callable[[], object], rounds: int) -> list[float]:
    """Wall times, in order of length."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1000)
    return sorted(times)


def main() -> None:
    """Print one line for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=65_000)
    parser.add_argument("--prompt-blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the file is written")
    arguments = parser.parse_args()
    print(
        f"{arguments.blocks} blocks, prompts of {arguments.prompt_blocks} blocks; medians of {arguments.rounds} rounds"
    )
    for num_sequences in (0, 1000, 10_000):
        core = fill(arguments.blocks, num_sequences, arguments.prompt_blocks)
        gc.collect()
        taken = core.snapshot()
        take = milliseconds(core.snapshot, arguments.rounds)
        turn = milliseconds(turner(core, arguments.folder), arguments.rounds)
        state = core.state
        own = state.replicasets[0]
        restore = milliseconds(lambda: Core.restored(own.config, own.plugins, taken), 3)  # noqa: B023
        print(
            f"{num_sequences:6} sequences: pause {statistics.median(turn):.1f} ms (longest {turn[-1]:.1f}), of it the "
            f"snapshot {statistics.median(take):.1f} ms; {len(taken):,} bytes; restored in {restore[1]:.0f} ms"
        )


if __name__ == "__main__":
    main()
