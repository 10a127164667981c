"""What each rank reads of a checkpoint, and how much memory its weights take, beside one worker that has all.

    python -m benchmarks.cpu.rank_weights FOLDER [--tensor 2] [--stages 1] [--quantization none] [--kernels compiled]

Each rank is loaded in a process of its own. Memory is by how much its peak rises over that of a process which has
loaded a tiny model: what a worker takes without any weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from eventlm.core.shards import Layout
from eventlm.kernels.cpu.native import available_builds
from eventlm.models.config import read_model
from eventlm.models.loader import load_cpu_decoder, load_decoder
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import matrix_formats, matrix_types
from eventlm.models.weights.slices import ModelPart
from eventlm.table import table
from eventlm.worker.ranks.shard import shard_of
from tests.kernels.cpu.decoders import Shape, write_checkpoint

MEBIBYTE = 1 << 20


class Loading(NamedTuple):
    """rank: -1: one worker with all weights."""

    folder: Path
    small: Path
    layout: Layout
    rank: int
    quantization: str
    kernels: str


class Loaded(NamedTuple):
    """Bytes read of files, and bytes by which the peak of memory rose."""

    read: int
    memory: int


def peak_bytes() -> int:
    """Of this process's resident memory."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def load(task: Loading, folder: Path, part: ModelPart | None) -> tuple[object, int]:
    """A decoder, and the bytes that were read for it."""
    told = [0]

    def on_progress(num_bytes: int, total_bytes: int) -> None:
        told.append(num_bytes)

    options: dict[str, Any] = {"quantization": task.quantization, "part": part, "on_progress": on_progress}
    if task.kernels == "torch":
        return load_decoder(folder, **options), told[-1]
    build = available_builds()[0]
    return load_cpu_decoder(folder, build, max_positions=256, num_threads=1, **options), told[-1]


def measure(task: Loading) -> Loaded:
    """Runs in a process of its own."""
    part = None
    if task.rank >= 0:
        model = read_model(task.folder)
        types = matrix_types(find_weights(task.folder, model), model, task.quantization)
        formats = matrix_formats(types, "bfloat16", task.quantization)
        part = shard_of(model, task.layout, task.layout.place_of(task.rank), formats).part
    small = load(task, task.small, None)
    before = peak_bytes()
    decoder, num_bytes = load(task, task.folder, part)
    memory = peak_bytes() - before
    del small, decoder
    return Loaded(num_bytes, memory)


def measure_all(folder: Path, layout: Layout, quantization: str = "none", kernels: str = "compiled") -> list[Loaded]:
    """One worker with all, then each rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as other:
        small = write_checkpoint(Path(other), Shape())
        found = []
        for rank in range(-1, layout.num_ranks):
            with context.Pool(1) as pool:
                found.append(pool.apply(measure, (Loading(folder, small, layout, rank, quantization, kernels),)))
    return found


def main() -> None:
    """Print a row for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--quantization", default="none", choices=["none", "int4", "int8"])
    parser.add_argument("--kernels", default="compiled", choices=["compiled", "torch"])
    options = parser.parse_args()
    layout = Layout(options.tensor, options.stages)
    whole, *ranks = measure_all(options.folder, layout, options.quantization, options.kernels)
    rows = []
    for name, each in [("one worker", whole), *((f"rank {rank}", each) for rank, each in enumerate(ranks))]:
        shares = [(f"{own / MEBIBYTE:.1f}", f"{own / of_all:.3f}") for own, of_all in zip(each, whole, strict=True)]
        rows.append([name, *shares[0], *shares[1]])
    print(*table(["", "MiB read", "of all", "MiB of memory", "of all"], rows), sep="\n")


if __name__ == "__main__":
    main()
