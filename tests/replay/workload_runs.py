"""Records and verifies many random workloads, in processes of their own with a hash seed each.

python -m tests.replay.workload_runs record FOLDER FIRST LAST [--large | --states | --backends]
python -m tests.replay.workload_runs verify FOLDER FIRST LAST
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import structs

from eventlm.bus.log_writer import LogWriter
from eventlm.events import DECISIONS, FACTS, MARKERS, Event
from eventlm.replay.verify.verifier import verify
from eventlm.system.system import real_system
from tests.replay.backend_runs import backends_of
from tests.simulation import Simulation
from tests.workload import Chaos, draw_large_machine, draw_machine, with_sets, with_states

NUM_PROCESSES = 2
SEGMENT_BYTES = 8192


def record(folder: Path, seed: int, kind: str = "") -> Counter[str]:
    """Run a workload with its state validated, and record it; how often each event and outcome occurred."""
    options: dict[str, Any] = {}
    if kind == "--states":
        machine = with_states(draw_machine(random.Random(seed), seed), seed)
        # Where prompts are long and chunks short, workers that die often die again before a prompt is computed.
        fake = structs.replace(machine.fake, die_ppm=machine.fake.die_ppm // 10)
        options = {"check_every": 10, "machine": machine._replace(fake=fake)}
    elif kind == "--large":
        options = {"num_requests": 60, "check_every": 10, "machine": draw_large_machine(random.Random(seed), seed)}
    elif seed % 8 == 6:
        options = {"machine": with_sets(draw_machine(random.Random(seed), seed), seed)}
    elif kind == "--backends" or seed % 8 == 3:
        options = {"machine": backends_of(seed)}
    # One in five is in many segments; plug-ins are drawn by the seed modulo 48.
    with LogWriter(real_system(), folder, f"seed-{seed}", segment_bytes=0 if seed % 5 else SEGMENT_BYTES) as writer:
        simulation = Simulation(seed, writer=writer, chaos=Chaos(recoveries=seed % 3), **options)
        counts: Counter[str] = Counter()
        simulation.engine_core.bus.attach(lambda event: counts.update(_names(event)))
        outcomes = simulation.run()
        counts.update(outcome.reason for outcome in outcomes.values())
        return counts


def _names(event: Event) -> list[str]:
    tag = str(event.__struct_config__.tag)
    reason = getattr(event, "reason", "") if tag in ("preempt", "reject") else ""
    return [tag, f"{tag} {reason}"] if reason else [tag]


def work(action: str, folder: Path, first: int, last: int, kind: str = "") -> Counter[str]:
    """Record or verify the workloads from `first` to before `last`. Raises AssertionError at the first failure."""
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        if action == "record":
            counts += record(folder, seed, kind)
            continue
        run = folder / f"seed-{seed}"
        result = verify(run)
        assert result.divergence is None, f"workload {seed}: {result.divergence}"
        assert result.clean_end
        assert result.warnings == []
        counts["decisions verified"] += result.num_decisions
        counts["checkpoints"] += result.num_checkpoints
        counts["segments"] += result.num_segments
        if result.num_segments > 1:
            alone = [verify(path) for path in run.glob("trace*.jsonl")]
            assert all(part.exit_code == 0 and not part.warnings for part in alone), f"workload {seed}, a segment alone"
            assert sum(part.num_decisions for part in alone) == result.num_decisions
    return counts


def in_processes(action: str, folder: Path, first: int, last: int, *, hash_seed: int, kind: str = "") -> Counter[str]:
    """`work` in two processes at once; the sum of what they counted. Raises AssertionError with what one said."""
    bounds = [first + (last - first) * part // NUM_PROCESSES for part in range(NUM_PROCESSES + 1)]
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, action, str(folder), str(low), str(high), kind],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        for low, high in pairwise(bounds)
    ]
    counts: Counter[str] = Counter()
    failures = []
    try:
        for process in processes:
            output, errors = process.communicate()
            if process.returncode:
                failures.append(errors.decode())
            else:
                counts += Counter(json.loads(output))
    finally:
        # A test that is given up leaves none behind.
        for process in processes:
            process.kill()
            process.wait()
    assert not failures, "\n".join(failures)
    return counts


ALL_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in (*FACTS, *DECISIONS, *MARKERS))


if __name__ == "__main__":
    chosen, place, low, high, *kinds = sys.argv[1:]
    print(json.dumps(work(chosen, Path(place), int(low), int(high), *kinds)))
