"""All that is measured on a GPU, in one run of at most ten minutes: kernels, the engine, what its features cost.

    python benchmarks/gpu.py [--sections kernels,nano] [--budget 570] [--out results/gpu.json]
    python benchmarks/gpu.py --smoke      every section on the CPU with tiny shapes, in Triton's interpreter
    python benchmarks/gpu.py --tune       instead: find the fastest configurations of kernels for this GPU, store them

Checkpoints are made on the spot, with random weights of the shapes of Qwen3-0.6B and Qwen3-8B; nothing is fetched.
Each section runs in a process of its own and for a share of the budget; an error, a crash or a time-out is a row of the
table, and the others go on. A ratio is to the copy bandwidth or the bf16 product rate that the same run measures first
(section `ceilings`), or to a peer in the same run. Under `target` the table says what the ratio, or the value where
there is none, should be at least or at most (measured: no target, or a smoke run, whose times say nothing).
`benchmarks/gpu_harness/report.py` makes Markdown of the file.

Sections:

    ceilings         copy bandwidth and product rate, which ratios are to
    kernels          each kernel against its reference, then its rate
    correct          the engine's tokens against transformers'
    nano, nano8b     nano-vLLM's workload on both shapes, against the roofline of its own trace
    gaps             what lies between decode steps
    recording        with a trace and without
    http             through the server, against without one
    reexecute        recorded runs executed again, token by token
    batch_invariant  what --batch-invariant costs, and whether it holds
    fp8              fp8 keys and values
    memory           what is asked for against what is taken, and a model that does not fit
    torch_compile    what it gains, and how long it takes
    sanitizer        compute-sanitizer over all kernels, where it is installed

Nothing else should run on the GPU. Exit code 0: nothing failed, though targets may be missed; 1: something failed.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_harness.process import Limits, run_section
from benchmarks.gpu_harness.report import Report, encode, one_line, render
from benchmarks.gpu_harness.row import Context, Row
from benchmarks.gpu_harness.section import Section
from benchmarks.gpu_sections import SECTIONS

DEFAULT_BUDGET = 570.0
#: The share of the time left over by earlier sections, or meant for later ones, that a section may take.
SLACK = 1.5
OUT, SMOKE_OUT = Path("results/gpu.json"), Path("results/gpu-smoke.json")
PACKAGES = ("torch", "triton", "transformers")


def plan(sections: Sequence[Section], left: float) -> float:
    """Seconds for the first of the sections, of those that are left for all of them."""
    return left * sections[0].seconds / sum(section.seconds for section in sections)


def run(sections: Sequence[Section], *, smoke: bool, budget: float, folder: Path) -> Iterator[Row]:
    """What all sections find."""
    deadline = time.monotonic() + budget
    for index, section in enumerate(sections):
        left = deadline - time.monotonic()
        seconds = plan(sections[index:], left)
        if seconds < 1:
            yield Row(section=section.name, what="all", outcome="skipped", note="no time is left")
            continue
        began = time.monotonic()
        say(f"{section.name}: up to {seconds:.0f} s")
        context = Context(module=section.module, smoke=smoke, folder=str(folder), seconds=seconds)
        # Those of parts are for a GPU.
        limits = Limits(section=min(SLACK * seconds, left), part=math.inf if smoke else section.part_seconds)
        num_rows = 0
        for row in run_section(section, context, limits):
            num_rows += 1
            say(one_line(row))
            yield row
        if not num_rows:
            yield Row(section=section.name, what="all", outcome="skipped", note="there is nothing to measure")
        say(f"{section.name}: {time.monotonic() - began:.0f} s")


def choose(names: str) -> list[Section]:
    """The sections that a list names, in their order, with the ceilings if any needs them. Raises ValueError."""
    known = {section.name: section for section in SECTIONS}
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no section {name!r}; there are {', '.join(known)}")
    needs_ceilings = any(known[name].needs_ceilings for name in wanted)
    return [
        section for section in SECTIONS if section.name in wanted or (section.name == "ceilings" and needs_ceilings)
    ]


def tune(*, smoke: bool, budget: float) -> None:
    """Store the fastest configurations of kernels; a smoke run forgets them."""
    if smoke:
        # Before Triton is imported.
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    import torch

    from benchmarks.kernels import tune

    for line in tune.tune(torch.device("cpu" if smoke else "cuda"), budget, smoke=smoke):
        print(line, flush=True)


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


def say(line: str) -> None:
    """Progress; the table alone goes to the standard output."""
    print(line, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    names = ",".join(section.name for section in SECTIONS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="on the CPU, tiny, to see that everything runs")
    parser.add_argument("--sections", default=names, metavar="NAME,...", help="what to run (default: all)")
    parser.add_argument("--tune", action="store_true", help="write kernels/gpu/tuned.toml anew for this GPU instead")
    parser.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET, metavar="SECONDS", help="of the whole run (570)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"for all figures (default: {OUT}, of a smoke run {SMOKE_OUT})"
    )
    arguments = parser.parse_args()
    arguments.out = arguments.out or (SMOKE_OUT if arguments.smoke else OUT)
    if not arguments.budget > 0:
        parser.error("--budget is above 0 seconds")
    try:
        arguments.chosen = choose(arguments.sections)
    except ValueError as error:
        parser.error(f"--sections: {error}")
    return arguments


def main() -> int:
    """Run the sections, keep what they found as they go, print the table."""
    arguments = parse_arguments()
    if not arguments.smoke and not has_gpu():
        say("gpu.py: torch sees no GPU here; --smoke runs every section on the CPU")
        return 2
    if arguments.tune:
        tune(smoke=arguments.smoke, budget=arguments.budget)
        return 0
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.touch()
    except OSError as error:
        say(f"gpu.py: --out {arguments.out} cannot be written: {error.strerror}")
        return 2
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}
    began = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as folder:
        for row in run(arguments.chosen, smoke=arguments.smoke, budget=arguments.budget, folder=Path(folder)):
            rows.append(row)
            report = Report(smoke=arguments.smoke, versions=versions, seconds=time.monotonic() - began, rows=rows)
            arguments.out.write_bytes(encode(report))
    print("\n".join(render(rows)))
    say(f"figures: {arguments.out}")
    return int(any(row.outcome == "failed" for row in rows))


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    raise SystemExit(status)
