"""Time of a step that processes of one thread each compute together, beside one process of as many threads.

    python benchmarks/cpu/model_parts.py [--model smollm2] [--batch 1] [--size 2] [--gloo]

A step is a decode of each sequence and the draw of its token. Weights are random. The two take turns, some steps at a
time, and of each the median over all turns counts; the ratio is the median of those of neighbouring turns. Shared
machines change speed within seconds: read the ratio, and how far its quartiles are apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

from eventlm.core.shards import Layout, Place
from eventlm.kernels.cpu.decoder import CpuDecoder, DecoderPeers, DecoderRow, DrawRows, KVLayers
from eventlm.kernels.cpu.meeting import (
    SHARED_SPIN_US,
    SPIN_US,
    CarriedMeeting,
    Meeting,
    create_segment,
    slot_bytes_for,
)
from eventlm.kernels.cpu.native import available_builds
from eventlm.models.cpu_kernels import native_model
from eventlm.models.rope import compiled_angles
from eventlm.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.system.processors import usable_cores
from eventlm.table import table
from eventlm.worker.ranks.shard import shard_of


def model_of(*, hidden: int, layers: int, heads: tuple[int, int, int], neurons: int, vocab: int) -> ModelSpec:
    """A Llama, tied. heads: query heads, key heads, elements of each."""
    num_heads, num_kv_heads, head_dim = heads
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeSpec(rotary_dim=head_dim),
        scale=head_dim**-0.5,
    )
    return ModelSpec(
        architecture="",
        vocab_size=vocab,
        hidden_size=hidden,
        layers=(LayerSpec(attention=attention, feed_forward=FeedForwardSpec(size=neurons)),) * layers,
        norm=NormSpec(eps=1e-5),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


MODELS = {
    "smollm2": model_of(hidden=576, layers=30, heads=(9, 3, 64), neurons=1536, vocab=49152),
    "qwen3-0.6b": model_of(hidden=1024, layers=28, heads=(16, 8, 128), neurons=3072, vocab=151936),
}
BLOCK_SIZE = 16
TURNS, TURN_SECONDS = 30, 0.5


class Setup(NamedTuple):
    """What one process computes. size: of the group that shares the model; 1: it has all, and `num_threads`."""

    model: ModelSpec
    build: str
    size: int
    number: int
    num_threads: int
    batch: int
    context: int
    folder: str
    is_over_gloo: bool


class Turn(NamedTuple):
    """What a turn took for each step, and of that what waiting for peers and adding up their parts did."""

    step_ms: float
    meetings: float = 0.0
    meeting_us: float = 0.0
    add_us: float = 0.0


class Part:
    """A decoder with random weights, or with its part of them, over contexts of zeros."""

    def __init__(self, setup: Setup) -> None:
        spec, peers = setup.model, None
        self._group: Meeting | CarriedMeeting | None = None
        if setup.size > 1:
            shard = shard_of(setup.model, Layout(tensor=setup.size), Place(0, 0, setup.number))
            spec, self._group = shard.model, group_of(setup)
            peers = DecoderPeers(self._group, shard.vocab_starts)
        ropes = [compiled_angles(rope, 4096) for rope in spec.ropes]
        self._decoder = CpuDecoder(setup.build, native_model(spec), ropes, peers=peers, num_threads=setup.num_threads)
        values = (torch.rand(4096, 4096) - 0.5) * 0.1
        for key, shape in model_weights(spec).items():
            if len(shape) == 1:
                self._decoder.load(key.name, key.layer, torch.ones(shape))
                continue
            for first in range(0, shape[0], len(values)):
                rows = values[: min(len(values), shape[0] - first), : shape[1]]
                self._decoder.load(key.name, key.layer, rows, first)
        blocks = -(-(setup.context + 1) // BLOCK_SIZE)
        self._kv = KVLayers(
            [
                torch.zeros(2, setup.batch * blocks, kv.num_heads, BLOCK_SIZE, kv.head_dim, dtype=torch.bfloat16)
                for kv in spec.kv_shapes
                if kv is not None
            ]
        )
        self._rows = [
            DecoderRow(setup.context, 1, array("i", range(row * blocks, (row + 1) * blocks)))
            for row in range(setup.batch)
        ]
        self._draws = DrawRows([0.8] * setup.batch, range(setup.batch), [0] * setup.batch)
        self._token_ids = list(range(setup.batch))

    def step(self) -> None:
        """The tokens that it draws are those of the next."""
        hidden_TH = self._decoder.forward(self._token_ids, self._rows, self._kv)
        self._token_ids = self._decoder.draw_next(hidden_TH, self._draws)

    def turn(self, num_steps: int) -> Turn:
        """So many steps, after one that wakes all."""
        self.step()
        before, meetings = self._decoder.times_ns(), self._group.num_meetings if self._group else 0
        start = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        step_ms = (time.perf_counter() - start) * 1e3 / num_steps
        if self._group is None:
            return Turn(step_ms)
        after, count = self._decoder.times_ns(), self._group.num_meetings - meetings
        waited, added = (after[part] - before[part] for part in ("meeting", "add_parts"))
        return Turn(step_ms, count / num_steps, waited / count / 1e3, added / count / 1e3)


def group_of(setup: Setup) -> Meeting | CarriedMeeting:
    """Where a member meets the others."""
    slot_bytes = slot_bytes_of(setup)
    if not setup.is_over_gloo:
        spin_us = SPIN_US if setup.size * setup.num_threads <= usable_cores() else SHARED_SPIN_US
        return Meeting(segment_of(setup), size=setup.size, number=setup.number, slot_bytes=slot_bytes, spin_us=spin_us)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{setup.folder}/store", rank=setup.number, world_size=setup.size
    )

    def carry(mine: Tensor, everything: Tensor) -> None:
        torch.distributed.all_gather(list(everything), mine)

    return CarriedMeeting(carry, size=setup.size, number=setup.number, slot_bytes=slot_bytes)


def slot_bytes_of(setup: Setup) -> int:
    """Take the tokens of a step; its logits are not wanted."""
    return slot_bytes_for(setup.batch, setup.model.hidden_size, setup.model.vocab_size)


def segment_of(setup: Setup) -> Path:
    """Where the members of the group meet."""
    return Path(setup.folder) / "segment"


def serve(setup: Setup, pipe: Connection) -> None:
    """Take turns when told."""
    torch.set_num_threads(1)
    part = Part(setup)
    pipe.send("ready")
    while (num_steps := pipe.recv()) > 0:
        pipe.send(part.turn(num_steps))


def measure(setups: list[list[Setup]]) -> list[list[Turn]]:
    """All turns of each: of the first of its processes."""
    context = multiprocessing.get_context("spawn")
    groups = []
    for members in setups:
        pipes = []
        for setup in members:
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(setup, theirs), daemon=True).start()
            pipes.append(ours)
        groups.append(pipes)
        for pipe in pipes:
            pipe.recv()

    def turn(pipes: list[Connection], num_steps: int) -> Turn:
        for pipe in pipes:
            pipe.send(num_steps)
        of_first, *_ = [pipe.recv() for pipe in pipes]
        assert isinstance(of_first, Turn)
        return of_first

    num_steps = max(1, round(TURN_SECONDS * 1e3 / turn(groups[0], 3).step_ms))
    turns: list[list[Turn]] = [[] for _ in groups]
    for _ in range(TURNS):
        for pipes, found in zip(groups, turns, strict=True):
            found.append(turn(pipes, num_steps))
    for pipes in groups:
        for pipe in pipes:
            pipe.send(0)
    return turns


def median(turns: list[Turn], value: Callable[[Turn], float]) -> float:
    """Of all turns."""
    return statistics.median(map(value, turns))


def main() -> None:
    """Measure what the command line asks for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--gloo", action="store_true", help="meet over torch.distributed in place of shared memory")
    parser.add_argument("--build", choices=available_builds(), default=available_builds()[0])
    options = parser.parse_args()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        whole = Setup(
            MODELS[options.model],
            options.build,
            1,
            0,
            options.size,
            options.batch,
            options.context,
            folder,
            options.gloo,
        )
        members = [whole._replace(size=options.size, number=i, num_threads=1) for i in range(options.size)]
        create_segment(segment_of(members[0]), size=options.size, slot_bytes=slot_bytes_of(whole))
        of_one, of_peers = measure([[whole], members])
    ratios = [peers.step_ms / one.step_ms for one, peers in zip(of_one, of_peers, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    where = "over Gloo" if options.gloo else "in shared memory"
    print(f"{options.model}, batch {options.batch}, contexts of {options.context}, {options.build}, {where}")
    rows = [
        [f"one of {options.size} threads", f"{median(of_one, lambda turn: turn.step_ms):.2f}", "", "", "", ""],
        [
            f"{options.size} of one thread",
            f"{median(of_peers, lambda turn: turn.step_ms):.2f}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            f"{median(of_peers, lambda turn: turn.meetings):.0f}",
            f"{median(of_peers, lambda turn: turn.meeting_us):.1f}",
            f"{median(of_peers, lambda turn: turn.add_us):.1f}",
        ],
    ]
    print("\n".join(table(["processes", "ms a step", "ratio", "meetings a step", "us each", "us adding up"], rows)))


if __name__ == "__main__":
    main()
