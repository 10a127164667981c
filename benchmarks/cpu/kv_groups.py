"""What each rank reads of the keys and values of a long context for a decode, and how long its attention takes.

    python -m benchmarks.cpu.kv_groups [--groups 2] [--context 32768] [--shard 8192]

The model is random, its heads are those of SmolLM2. Bytes are those of the tokens that a rank's passes go over; times
those of the operation `attention` and of the waiting for other ranks, all with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from eventlm.core.shards import Layout, group_of
from eventlm.table import table
from eventlm.types import ceil_div
from eventlm.worker.model_runner import ModelRunner
from eventlm.worker.protocol import Peers, StepPayload
from tests.kernels.cpu.decoders import Shape, write_checkpoint
from tests.worker.launches import launched, new_sequence
from tests.worker.ranks.replica import Replica
from tests.worker.reference import make_runner

BLOCK = 16
MODEL = Shape(576, 1536, 1024, num_heads=9, num_kv_heads=3, head_dim=64, num_layers=4)


class Reading(NamedTuple):
    """Bytes of keys and values that a decode reads, and milliseconds of a step's attention, and of waiting."""

    kv_bytes: int
    attention_ms: float
    waiting_ms: float


def measure(num_groups: int, context: int, shard: int, num_steps: int = 5) -> list[Reading]:
    """One worker, then each rank, for a decode whose sequence has `context` tokens with the new one."""
    num_blocks = ceil_div(context, BLOCK) + 8
    fields: dict[str, Any] = {"dtype": "bfloat16", "block_size": BLOCK, "max_model_len": context + 64}
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        folder = write_checkpoint(Path(name), MODEL, max_positions=context + 64)
        alone = make_runner(folder, num_blocks=num_groups * num_blocks, **fields)
        found = _decode(alone, [alone], num_groups, num_blocks, context, shard, num_steps)
        fields |= {"num_blocks": num_blocks, "kv_shard_tokens": shard}
        ranks = Replica(folder, Layout(1, 1, num_groups), Peers(shared_memory=shared), **fields)
        return found + _decode(ranks, ranks.runners, num_groups, num_blocks, context, shard, num_steps)


def _decode(
    runner: Any, ranks: list[ModelRunner], num_groups: int, num_blocks: int, context: int, shard: int, num_steps: int
) -> list[Reading]:
    free = [iter(range(group * num_blocks, (group + 1) * num_blocks)) for group in range(num_groups)]
    blocks = [next(free[group_of(place * BLOCK, 0, shard, num_groups)]) for place in range(ceil_div(context, BLOCK))]
    times: list[list[tuple[float, float]]] = [[] for _ in ranks]
    for rank in ranks:
        # Memory that was never written is read from one page.
        rank.cache.kv.normal_()
    for step in range(num_steps):
        # It is new in each step, so that the context is always as long.
        new = new_sequence(step, [5] * context)
        before = [_times_ns(rank) for rank in ranks]
        runner.execute(
            launched(
                step,
                decodes=[(step, 0, context, 0)],
                blocks=[(0, 0, blocks)],
                forget=[(step - 1, 0)] if step else [],
            ),
            StepPayload(new=[new]),
        )
        for number, rank in enumerate(ranks):
            after = _times_ns(rank)
            spent = [(after[part] - before[number][part]) / 1e6 for part in ("attention", "meeting")]
            times[number].append((spent[0], spent[1]))
    return [
        Reading(
            _num_read(rank, number, context) * rank.cache.token_bytes,
            statistics.median(spent for spent, _ in times[number]),
            statistics.median(spent for _, spent in times[number]),
        )
        for number, rank in enumerate(ranks)
    ]


def _times_ns(rank: ModelRunner) -> dict[str, int]:
    """By part of its compiled forward pass, since the start."""
    forward: Any = rank._forward
    times: dict[str, int] = forward._decoder.times_ns()
    return times


def _num_read(rank: ModelRunner, number: int, context: int) -> int:
    """Tokens of its shards."""
    return context if rank._group is None else rank._group.num_own(context, number)


def main() -> None:
    """Print a row for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--shard", type=int, default=8192)
    options = parser.parse_args()
    alone, *ranks = measure(options.groups, options.context, options.shard)
    rows = [
        [
            name,
            f"{each.kv_bytes / (1 << 20):.1f}",
            f"{each.kv_bytes / alone.kv_bytes:.3f}",
            f"{each.attention_ms:.2f}",
            f"{each.waiting_ms:.2f}",
        ]
        for name, each in [("one worker", alone), *((f"rank {rank}", each) for rank, each in enumerate(ranks))]
    ]
    print(*table(["", "MiB of KV read", "of all", "ms of attention", "ms of waiting"], rows), sep="\n")


if __name__ == "__main__":
    main()
