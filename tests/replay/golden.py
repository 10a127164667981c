"""Golden traces: small runs as they were, kept beside the tests.

    python -m tests.replay.golden     # record them anew

A change of behaviour shows as a golden trace that does not verify. Until the first release such a change bumps
BEHAVIOUR_VERSION, and the traces are recorded anew in the same commit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.replay.traces import CALM, Objects, indices, record, small_machine, tampered
from tests.workload import Chaos, Machine, with_states

FOLDER = Path(__file__).with_suffix("")
MAX_BYTES = 60 * 1024


class Golden(NamedTuple):
    """A run by its machine and seed."""

    machine: Machine
    chaos: Chaos
    seed: int
    num_requests: int


GOLDEN = {
    # Groups, chunks, shared prefixes, samples of one prompt; one step at a time.
    "fcfs_one_replica": Golden(small_machine({"type": "fcfs"}, max_steps_in_flight=1), CALM, 3, 8),
    # A tight pool and slots: evictions, memory preemptions; ends in the text, deadlines, cancels.
    "edf_tight": Golden(
        small_machine(
            {"type": "edf", "min_deadline_ms": 1, "evict_margin_ms": 5},
            num_blocks=10,
            max_model_len=36,
            graph_buckets=[1, 2, 4],
        ),
        Chaos(kills=0, text_ends=0.6),
        0,
        8,
    ),
    # Two replicas whose workers die, rows of several tokens, grammars, swaps.
    "lrs_dying_workers": Golden(
        small_machine(
            {"type": "lrs", "min_deadline_ms": 1}, num_replicas=2, max_tokens_per_row=3, max_steps_in_flight=3
        ),
        Chaos(kills=4, grammars=0.3),
        22,
        8,
    ),
    # Long prompts that share a prefix and give way; two replicas with one queue.
    "lpm_space_sharing": Golden(
        small_machine({"type": "lpm"}, num_replicas=2, max_num_seqs=3)._replace(
            batcher={"type": "space_sharing", "target_ms": 3, "min_chunk_tokens": 1, "min_long_steps": 0},
            router={"type": "pull"},
        ),
        CALM,
        5,
        10,
    ),
    # The engine dies, and another one goes on: with texts whose end is owed, grammars, and two replicas.
    "edf_recovered": Golden(
        small_machine({"type": "edf", "min_deadline_ms": 1}, num_replicas=2, max_num_seqs=3, max_steps_in_flight=2),
        Chaos(kills=0, grammars=0.3, text_ends=0.6, recoveries=2, poison_ppm=0),
        49,
        8,
    ),
    # Recurrent layers: copies of states are kept and hit, blocks and slots are scarce.
    "fcfs_recurrent": Golden(
        with_states(small_machine({"type": "fcfs"}, num_blocks=20, max_model_len=76, max_num_seqs=3), 1),
        Chaos(kills=1),
        5,
        12,
    ),
}
#: The first of them with a launch that gives a block to a sequence that does not own it.
BROKEN = "broken_block"


def record_golden(name: str, folder: Path) -> Path:
    """Record one of the runs in `folder`."""
    golden = GOLDEN[name]
    return record(
        folder, golden.machine, seed=golden.seed, chaos=golden.chaos, num_requests=golden.num_requests, run=name
    )


def break_block(objects: Objects) -> None:
    """Change one block number of the tenth launch that writes any."""
    launches = [index for index in indices(objects, "launch") if "blocks" in objects[index]]
    numbers = objects[launches[9]]["blocks"][0][2]
    numbers[0] = (numbers[0] + 1) % objects[0]["core"]["num_blocks"]


def main() -> None:
    """Record all golden traces anew."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in GOLDEN:
            content = record_golden(name, Path(temporary)).read_bytes()
            assert len(content) < MAX_BYTES, f"{name} has {len(content)} bytes"
            (FOLDER / f"{name}.jsonl").write_bytes(content)
            print(f"{name}: {len(content.splitlines())} events, {len(content)} bytes")
    tampered(FOLDER / f"{next(iter(GOLDEN))}.jsonl", FOLDER / f"{BROKEN}.jsonl", break_block)


if __name__ == "__main__":
    main()
