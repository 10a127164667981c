"""What the core costs: `apply` of a completed step, policy included, against batch and queue sizes.

    python benchmarks/core/throughput.py [--steps 400] [--json FILE]

A machine of one replica is filled with `running` decodes and `waiting` sequences that do not fit; then steps are
completed one by one, each followed by the launch of the next. In the last cases all prompts share a long cached
prefix. Reported is the median time of one `apply` of such a completion, and the same for verifying the recorded lines.
Times are of the processor; whatever else runs on the machine takes caches away, and lengthens them.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypedDict

from eventlm.bus.log_reader import LogLine
from eventlm.config import CoreConfig
from eventlm.core.predictor import DEFAULT_COEFFICIENTS
from eventlm.engine.plugins.registry import resolve
from eventlm.events import Arrived, Event, Header, Launched, StepCompleted, WorkerUp
from eventlm.events.codec import encode_body
from eventlm.replay.rebuild import rebuild
from eventlm.replay.verify.verifier import Verifier
from eventlm.scheduling_params import SchedulingParams

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
#: More steps than it takes until all prompts are computed.
RAMP_TOKENS = 64


class Case(NamedTuple):
    """How many sequences run and wait, and how many leading tokens of their prompts are the same."""

    running: int
    waiting: int
    shared_tokens: int = 0


CASES = (
    Case(32, 0),
    Case(32, 100),
    Case(256, 1_000),
    Case(1_024, 1_000),
    Case(256, 10_000),
    Case(1_024, 10_000),
    Case(8, 64, 65_536),
)


class Cost(NamedTuple):
    """Median microseconds of one completed step."""

    policy: str
    running: int
    waiting: int
    shared_tokens: int
    apply_us: float
    apply_p99_us: float
    verify_us: float


def make_header(policy: str, case: Case, max_tokens: int) -> Header:
    """A machine on which exactly `case.running` sequences fit: it has no slots for more, or no blocks."""
    plugins = [resolve("policy", {"type": policy}), resolve("batcher", {"type": "fixed"})]
    plugins.append(resolve("router", {"type": "pull"}))
    return Header(
        run="benchmark",
        unix_start_ns="0",
        code_version="0",
        core=CoreConfig(
            models=["m"],
            block_size=BLOCK_SIZE,
            num_blocks=case.shared_tokens // BLOCK_SIZE
            + case.running * ((PROMPT_TOKENS + max_tokens) // BLOCK_SIZE + 2),
            max_model_len=case.shared_tokens + 2 * PROMPT_TOKENS + max_tokens,
            max_num_seqs=2 * case.running if case.shared_tokens else case.running,
            max_num_batched_tokens=max(8192, case.running),
            max_queue_len=1_000_000,
            max_steps_in_flight=1,
            max_decodes_in_flight_per_seq=1,
        ),
        plugins=[plugin.record for plugin in plugins],
        predictor=list(DEFAULT_COEFFICIENTS),
    )


class Stamp(TypedDict):
    """Where a fact stands in the log: its number, its time in nanoseconds, and how many events its tick has."""

    s: int
    ts: int
    p: int


class Run:
    """Feeds a core and keeps the events it saw and made."""

    def __init__(self, header: Header) -> None:
        self.core = rebuild(header).new_core()
        self.core.apply(header)
        self.events: list[Event] = [header]
        self.now_ns = 0

    def apply(self, fact: Arrived | StepCompleted | WorkerUp) -> tuple[Launched | None, int]:
        """Apply a fact; the launch it led to, and the nanoseconds it took."""
        start = time.process_time_ns()
        decisions = self.core.apply(fact)
        took = time.process_time_ns() - start
        self.events += [fact, *decisions]
        launches = [decision for decision in decisions if isinstance(decision, Launched)]
        return (launches[0] if launches else None), took

    def next(self) -> Stamp:
        """Stamp of the next fact."""
        self.now_ns += 1_000_000
        return {"s": self.core.next_seq, "ts": self.now_ns, "p": 1}


def completion(run: Run, launched: Launched, names: dict[int, int]) -> StepCompleted:
    """Every sampling row produced a token, and every 16th token fills a block."""
    produced = [1] * len(launched.decodes) + [row[4] for row in launched.chunks]
    filled = []
    for row, (_, _, confirmed, _) in enumerate(launched.decodes):
        if confirmed % BLOCK_SIZE == 0:
            names[0] += 1
            filled.append((row, [names[0]]))
    return StepCompleted(
        **run.next(),
        c=launched.s,
        replica=0,
        epoch=launched.epoch,
        step=launched.step,
        start_ns=run.now_ns,
        end_ns=run.now_ns,
        produced=produced,
        filled=filled,
    )


def measure(policy: str, case: Case, num_steps: int) -> Cost:
    """Fill the machine, then time its steps."""
    running, waiting, shared_tokens = case
    # No sequence ends before the last timed step.
    max_tokens = num_steps + RAMP_TOKENS
    run = Run(make_header(policy, case, max_tokens))
    launched, _ = run.apply(WorkerUp(**run.next(), replica=0, epoch=1))
    shared = list(range(1, shared_tokens // BLOCK_SIZE + 1))
    for _ in range(running + waiting):
        found, _ = run.apply(
            Arrived(
                **run.next(),
                prompt_tokens=shared_tokens + PROMPT_TOKENS,
                blocks=shared,
                max_tokens=max_tokens,
                scheduling=SchedulingParams(model="m", offline=True),
            )
        )
        launched = launched or found
    assert launched is not None
    names = {0: len(shared)}
    while len(launched.decodes) < running:
        launched, _ = run.apply(completion(run, launched, names))
        assert launched is not None
    first_timed = len(run.events)
    times = []
    gc.collect()
    gc.disable()
    for _ in range(num_steps):
        fact = completion(run, launched, names)
        launched, took = run.apply(fact)
        assert launched is not None
        times.append(took)
    gc.enable()
    times.sort()
    return Cost(
        policy,
        *case,
        statistics.median(times) / 1000,
        times[len(times) * 99 // 100] / 1000,
        verify_time(run, first_timed),
    )


def verify_time(run: Run, first_timed: int) -> float:
    """Microseconds a step to verify the timed part, reading aside."""
    header = run.events[0]
    assert isinstance(header, Header)
    lines = []
    for event in run.events:
        body = encode_body(event)
        tag = str(type(event).__struct_config__.tag)
        lines.append(LogLine("", event.s + 1, 0, tag, event.s, body))
    verifier = Verifier(rebuild(header), header)
    for line in lines[:first_timed]:
        verifier.feed(line)
    gc.collect()
    gc.disable()
    times = []
    step_lines = lines[first_timed:]
    starts = [i for i, line in enumerate(step_lines) if line.tag == "done"] + [len(step_lines)]
    for first, last in pairwise(starts):
        start = time.process_time_ns()
        for line in step_lines[first:last]:
            verifier.feed(line)
        times.append(time.process_time_ns() - start)
    gc.enable()
    return statistics.median(times) / 1000


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps to time in each case")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one process")
    heads = f"{'policy':8}{'running':>9}{'waiting':>9}{'shared':>9}{'apply us':>10}{'p99 us':>9}"
    print(f"{heads}{'verify us':>11}{'verify/apply':>14}")
    costs = []
    for case in CASES:
        for policy in ("fcfs", "edf", "lrs"):
            cost = measure(policy, case, arguments.steps)
            costs.append(cost)
            print(
                f"{cost.policy:8}{cost.running:>9,}{cost.waiting:>9,}{cost.shared_tokens:>9,}{cost.apply_us:>10.0f}{cost.apply_p99_us:>9.0f}"
                f"{cost.verify_us:>11.0f}{cost.verify_us / cost.apply_us:>14.2f}"
            )
            sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps([cost._asdict() for cost in costs], indent=1))


if __name__ == "__main__":
    main()
