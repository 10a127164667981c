"""What a step costs against context, batch and chunk length, beside what the machine must spend on it: no cliffs.

    python benchmarks/cpu/cost.py [--plots context batch chunk behind] [--model FOLDER] [--output FILE.png]

    context  one token each for 1 and 4 sequences after contexts of 1k to 32k tokens
    batch    one token each for 1 to 256 sequences after 128 tokens
    chunk    the first 16 to 2,048 tokens of a prompt
    behind   256 tokens of a prompt after contexts of up to 32k tokens

A step is the worker's forward pass and the greedy draws of the rows that sample, in torch their logits; no engine, no
HTTP. Its floor is the longer of two times: its bytes (weights, keys and values) at the bandwidth, its FLOPs at the rate
of products that torch reaches, the better of what is measured before a line's steps and after them. A cliff is a point
whose cost per token lies more than `--tolerance` above the line between its neighbours, or, where steps only get
larger, above that of the smaller step before it.

The model has the shape of Qwen3-0.6B and random weights, which `--model` can keep. Keys and values are distinct for
all sequences; points that `--kv-gib` does not hold are left out. Times are the least of `--rounds` rounds, each of
which goes over all points. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cpu.cost_report import LABELS, Cost, Measured, Point, Series, as_json, cliffs, plot, render
from benchmarks.random_qwen import save_random_qwen
from eventlm.bench.step.floor import BatchShape, ModelFigures, floor_ns, integer_matrices, step_work, total
from eventlm.bench.step.machine_probe import Machine, measure
from eventlm.errors import EventLMError, UsageError
from eventlm.kernels.cpu.decoder import DrawRows
from eventlm.kernels.cpu.native import BUILDS
from eventlm.kernels.kv_quantization import is_quantized
from eventlm.models.config import SCALED_KV_DTYPES, kv_bytes_per_token, read_model, resolve_dtype, resolve_kv_dtype
from eventlm.models.cpu_kernels import AUTO, TORCH
from eventlm.models.spec import ModelSpec
from eventlm.sampling_params import SamplingParams
from eventlm.system.processors import usable_cores
from eventlm.types import ceil_div
from eventlm.worker.forward import Forward, make_cache, make_forward
from eventlm.worker.protocol import NewSequence, WorkerSetup
from eventlm.worker.sequence_table import Row
from eventlm.worker.sequence_table import WorkerSequence as WorkerSequence

BLOCK_SIZE = 16
CONTEXTS = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_000)
BATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CHUNKS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 264, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
BEHIND = (0, 256, 512, 1024, 2048, 4096, 8192, 16_384, 31_744)
MAX_LENGTH = 32_768


def all_series() -> list[Series]:
    """Every line of every plot."""
    decodes = [
        Series("context", f"batch {batch}", [Point(x, batch, 1, x) for x in CONTEXTS], grows=False) for batch in (1, 4)
    ]
    return [
        *decodes,
        Series("batch", "context 128", [Point(x, x, 1, 128) for x in BATCHES], grows=True),
        Series("chunk", "prompt", [Point(x, 1, x, 0) for x in CHUNKS], grows=True),
        Series("behind", "256 tokens", [Point(x, 1, 256, x) for x in BEHIND], grows=False),
    ]


def num_blocks(point: Point) -> int:
    """Of the keys and values of a step."""
    return point.num_rows * ceil_div(point.context + point.num_tokens, BLOCK_SIZE)


def kv_dtype(config: ModelSpec, options: argparse.Namespace) -> str:
    """What keys and values are kept in. Raises UsageError for what cannot be had."""
    dtype = resolve_dtype(config, options.dtype, options.quantization)
    return resolve_kv_dtype(config, dtype, options.kv_cache_dtype)


def block_values(kv: Tensor) -> Tensor:
    """Random keys or values of a block of `kv`."""
    if not is_quantized(kv):
        return torch.randn(kv.shape[-3:]).to(kv.dtype)
    # Any four of these bytes are a float32 below 1, wherever a kernel keeps its scales.
    return torch.randint(0x30, 0x40, kv.shape[-3:]).to(kv.dtype)


class Bench:
    """A model with so many blocks of keys and values."""

    def __init__(self, folder: Path, options: argparse.Namespace, num_blocks: int) -> None:
        self.config: ModelSpec = read_model(folder)
        setup = WorkerSetup(
            replica=0,
            epoch=1,
            model=str(folder),
            dtype=options.dtype,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=MAX_LENGTH,
            max_num_batched_tokens=max(CHUNKS),
            max_num_seqs=max(BATCHES),
            threads=options.threads,
            cpu_kernels=options.cpu_kernels,
        )
        self.forward: Forward = make_forward(setup, self.config, make_cache(setup, self.config))
        self._integers = integer_matrices(self.config, options.quantization, {})
        self.kv_token_bytes = kv_bytes_per_token(self.config, kv_dtype(self.config, options))
        # Memory that was never written costs nothing to read.
        for kv in self.forward.cache.stored:
            kv.copy_(block_values(kv).expand_as(kv))

    def rows(self, point: Point) -> list[Row]:
        """Of a step."""
        length = point.context + point.num_tokens
        blocks = ceil_div(length, BLOCK_SIZE)
        rows = []
        for number in range(point.num_rows):
            ids = [(number + index) % self.config.vocab_size for index in range(length)]
            new = NewSequence(request=number, index=0, token_ids=ids, num_prompt_tokens=1, params=SamplingParams())
            sequence = WorkerSequence(new)
            sequence.block_table.extend(range(number * blocks, (number + 1) * blocks))
            rows.append(Row(sequence, point.context, point.num_tokens, samples=True))
        return rows

    def floor_ns(self, point: Point, machine: Machine) -> float:
        """The lower bound of the step's time."""
        shape = BatchShape(point.num_rows, [(point.context, point.num_tokens)] * point.num_rows)
        model = ModelFigures(
            config=self.config,
            weight_bytes=self.forward.weight_bytes,
            kv_token_bytes=self.kv_token_bytes,
            integers=self._integers,
        )
        return floor_ns(total(step_work(model, shape).values()), machine)

    def step_ns(self, rows: list[Row]) -> int:
        """One step's time."""
        start = time.perf_counter_ns()
        hidden_TH = self.forward.run(rows, None)
        hidden_SH = hidden_TH[rows[0].num_tokens - 1 :: rows[0].num_tokens]
        if self.forward.draw_next is not None:
            nothing = [0] * len(rows)
            self.forward.draw_next(hidden_SH, DrawRows(temperatures=nothing, keys=nothing, positions=nothing))
        else:
            self.forward.logits(hidden_SH)
        return time.perf_counter_ns() - start


@torch.inference_mode()
def run_series(bench: Bench, series: Series, probe: Callable[[], Machine], rounds: int) -> Measured:
    """The least times of its points, which take turns; the first round does not count."""
    before = probe()
    steps = [bench.rows(point) for point in series.points]
    times: list[list[int]] = [[] for _ in steps]
    for turn in range(rounds + 1):
        for index, rows in enumerate(steps):
            spent = bench.step_ns(rows)
            if turn:
                times[index].append(spent)
        print(f"{series.plot}, {series.name}: round {turn} of {rounds}  ", end="\r", file=sys.stderr, flush=True)
    print(" " * 60, end="\r", file=sys.stderr)
    after = probe()
    machine = Machine(
        bytes_per_second=max(before.bytes_per_second, after.bytes_per_second),
        flops_per_second=max(before.flops_per_second, after.flops_per_second),
    )
    costs = [
        Cost(point, min(spent), bench.floor_ns(point, machine))
        for point, spent in zip(series.points, times, strict=True)
    ]
    return Measured(series, machine, costs)


def run(options: argparse.Namespace, folder: Path) -> None:
    """Measure all points, print the tables, write the picture. Raises EventLMError for what cannot be had."""
    threads = options.threads or usable_cores()
    torch.set_num_threads(threads)
    print(
        f"{threads} threads, {options.cpu_kernels}, {options.dtype}, quantization {options.quantization}, "
        f"KV cache {options.kv_cache_dtype}"
    )
    config = read_model(folder)
    block_bytes = BLOCK_SIZE * kv_bytes_per_token(config, kv_dtype(config, options))
    most_blocks = int(options.kv_gib * 2**30) // block_bytes
    wanted = []
    for series in all_series():
        points = [point for point in series.points if num_blocks(point) <= most_blocks]
        if points and series.plot in options.plots:
            wanted.append(series._replace(points=points))
    if not wanted:
        raise UsageError(f"--kv-gib {options.kv_gib:g} does not hold the keys and values of a single point; raise it")
    bench = Bench(folder, options, max(num_blocks(point) for series in wanted for point in series.points))
    measured, num_cliffs = [], 0
    for series in wanted:
        measured.append(run_series(bench, series, functools.partial(measure, threads), options.rounds))
        found = cliffs(measured[-1].costs, options.tolerance, grows=series.grows)
        num_cliffs += len(found)
        print("", *render(measured[-1], found), sep="\n", flush=True)
    backend = f"{bench.forward.host['attention_backend']}, {threads} threads"
    plot(options.output, measured, options.tolerance, backend)
    if options.json:
        options.json.write_text(json.dumps(as_json(backend, measured), indent=2))
    print(f"\n{num_cliffs} points more than {options.tolerance:.0%} above their neighbours; {options.output}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plots", nargs="+", choices=LABELS, default=list(LABELS), metavar="PLOT")
    parser.add_argument("--model", type=Path, help="checkpoint folder; if it is not there the random one is kept in it")
    parser.add_argument("--output", type=Path, default=Path("cost.png"), metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.1, help="above which a point is a cliff, a share")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="for keys and values")
    parser.add_argument("--threads", type=int, default=0, help="all processors if left out")
    parser.add_argument("--cpu-kernels", choices=[AUTO, *BUILDS, TORCH], default=AUTO, help="as of `serve`")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quantization", choices=["none", "int8"], default="none", help="of weights and activations")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "bfloat16", *SCALED_KV_DTYPES], default="auto")
    options = parser.parse_args()
    if options.rounds < 1 or options.threads < 0:
        parser.error("--rounds is 1 at least, --threads 0 at least")
    for path in filter(None, (options.output, options.json)):
        if not path.absolute().parent.is_dir():
            parser.error(f"{path}: its folder does not exist")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or Path(temporary)
        try:
            if not (folder / "config.json").is_file():
                save_random_qwen(folder)
            run(options, folder)
        except EventLMError as error:
            print(f"cost.py: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
