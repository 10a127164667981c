"""What policies and batchers do to short requests behind very long ones: TTFT by prompt length against load.

eventlm trace import --from azure AzureLLMInferenceTrace_conv.csv -o azure.jsonl
python benchmarks/simulated/azure_picture.py azure.jsonl --output DIR

{fcfs, edf, lrs} x {fixed, dynamic, space_sharing} on the hour as it was recorded, and on the same hour with a share of
very long prompts added to it, which it lacks: its longest prompt has 14,050 tokens, a second of prefill on an A100. The
simulations lie in DIR and are not run again. azure.png beside this file is one of them.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from eventlm.config.replicasets import TOP_REPLICASET
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.cost.roofline import RooflineCost
from eventlm.replay.simulate.summary import ClassSummary
from eventlm.replay.sweep.sweep import Configuration, Sweep, SweepPlan, SweepResult, make_configurations
from eventlm.replay.workload.file import WorkloadHeader, write_workload
from eventlm.replay.workload.request_line import WorkloadLine
from eventlm.replay.workload.source import load_workload
from eventlm.types import parts_per_million

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import LineStyleType

POLICIES = ("fcfs", "edf", "lrs")
BATCHERS = ("fixed", "dynamic", "space_sharing")
COLOURS = {"fcfs": "#c44e52", "edf": "#dd8f2e", "lrs": "#2f6db3"}
STYLES: dict[str, tuple[LineStyleType, str]] = {
    "fixed": (":", "o"),
    "dynamic": ("--", "s"),
    "space_sharing": ("-", "D"),
}
#: Lines that run together stay visible: those drawn later are thinner, and batchers are shifted a little sideways.
WIDTHS = {"fcfs": 5.0, "edf": 2.8, "lrs": 1.2}
SHIFTS = {"fixed": -0.012, "dynamic": 0.0, "space_sharing": 0.012}
QUANTILES = ("p50", "p99")
SEED = 0
LONG_OUTPUT_TOKENS = 100
INCHES_A_PANEL = (2.9, 2.1)
DOTS_PER_INCH = 85


class Hour(NamedTuple):
    """One of the two workloads, simulated. `title` says what it is."""

    title: str
    result: SweepResult


class Source(NamedTuple):
    """A workload file, decoded."""

    header: WorkloadHeader
    lines: list[WorkloadLine]


def read_lines(path: Path, minutes: float) -> Source:
    """The requests of the first minutes; 0: all."""
    header, *lines = path.read_bytes().splitlines()
    decoder = msgspec.json.Decoder(WorkloadLine)
    found = [decoder.decode(line) for line in lines]
    if minutes:
        found = [line for line in found if line.arrival_s <= 60 * minutes]
    return Source(msgspec.json.decode(header, type=WorkloadHeader), found)


def add_long_prompts(source: Source, target: Path, *, share: float, num_tokens: int) -> None:
    """The workload with a long prompt beside that share of its requests, drawn from a fixed seed."""
    draw = random.Random(SEED)

    def mixed() -> Iterator[WorkloadLine]:
        for line in source.lines:
            if draw.random() < share:
                yield WorkloadLine(arrival_s=line.arrival_s, prompt_tokens=num_tokens, output_tokens=LONG_OUTPUT_TOKENS)
            yield line

    name = f"{source.header.source} and {share:.1%} of {num_tokens} tokens"
    write_workload(target, msgspec.structs.replace(source.header, source=name), mixed())


def sweep(path: Path, loads: str, arguments: argparse.Namespace, cost: LinearCost | RooflineCost) -> SweepResult:
    """Every configuration under every load."""
    plan = SweepPlan(
        workload_path=str(path),
        costs={TOP_REPLICASET: cost},
        configurations=make_configurations(
            [{"type": name} for name in POLICIES], [{"type": name} for name in BATCHERS], [{"type": "pull"}], [1]
        ),
        loads_ppm=[parts_per_million(load) for load in loads.split(",")],
        limits=[],
        # No request is rejected, so that all lines show the same requests.
        options={"max_queue_len": 1_000_000},
    )
    from tqdm import tqdm

    with tqdm(desc=path.stem, unit=" simulations", file=sys.stderr) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return Sweep(plan, load_workload(path), arguments.output, num_jobs=arguments.jobs).run(on_progress=on_progress)


def draw(hours: list[Hour], path: Path, footnote: str) -> None:
    """Two rows of panels (p50, p99) for each workload, a column for each class of prompt lengths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    classes = sorted({edges for hour in hours for edges in _classes(hour.result)})
    width, height = INCHES_A_PANEL
    figure = Figure(
        figsize=(width * len(classes) + 0.4, height * 2 * len(hours) + 1.4), dpi=DOTS_PER_INCH, layout="constrained"
    )
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(hours), 1, squeeze=False)[:, 0]
    for part, hour in zip(parts, hours, strict=True):
        part.suptitle(hour.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        panels = part.subplots(2, len(classes), squeeze=False, sharex=True, sharey="row")
        for row, quantile in zip(panels, QUANTILES, strict=True):
            for axes, edges in zip(row, classes, strict=True):
                _panel(axes, hour.result, edges, quantile)
            row[0].set_ylabel(f"TTFT {quantile}, s", fontsize=9)
        for axes, edges in zip(panels[0], classes, strict=True):
            axes.set_title(_label(edges), fontsize=9)
        for axes in panels[1]:
            axes.set_xlabel("requests/s", fontsize=8)
    handles = [Line2D([], [], color=COLOURS[name], linewidth=WIDTHS[name], label=name) for name in POLICIES]
    handles += [
        Line2D(
            [],
            [],
            color="0.3",
            linestyle=STYLES[name][0],
            marker=STYLES[name][1],
            markersize=5,
            mfc="white",
            label=name,
        )
        for name in BATCHERS
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.supxlabel(footnote, fontsize=8, color="0.35")
    figure.savefig(path, pil_kwargs={"optimize": True})


def _panel(axes: Axes, result: SweepResult, edges: tuple[int, int], quantile: str) -> None:
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if edges not in _classes(result):
        axes.annotate(
            "no such prompts", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", fontsize=8, color="0.5"
        )
    for each in result.configurations:
        points = []
        for load_ppm, summary in each.summaries.items():
            of_class = next((found for found in summary.classes if _edges(found) == edges), None)
            if of_class is not None and "ttft" in of_class.latencies:
                rate = result.requests_per_second * load_ppm / 1e6
                points.append((rate, getattr(of_class.latencies["ttft"], quantile) / 1e9))
        policy, batcher = _names(each.configuration)
        style, marker = STYLES[batcher]
        axes.plot(
            [x * (1 + SHIFTS[batcher]) for x, _ in points],
            [y for _, y in points],
            color=COLOURS[policy],
            linestyle=style,
            marker=marker,
            markersize=WIDTHS[policy] + 2,
            markerfacecolor="white",
            linewidth=WIDTHS[policy],
            markeredgewidth=1.0,
            alpha=0.9,
        )


def _classes(result: SweepResult) -> list[tuple[int, int]]:
    """Those that anybody is in."""
    found = {
        _edges(each)
        for configuration in result.configurations
        for summary in configuration.summaries.values()
        for each in summary.classes
    }
    return sorted(found)


def _edges(found: ClassSummary) -> tuple[int, int]:
    return found.min_tokens, found.max_tokens or sys.maxsize


def _label(edges: tuple[int, int]) -> str:
    lower, upper = edges
    return f"{lower:,} tokens or more" if upper == sys.maxsize else f"{lower:,} to {upper:,} tokens"


def _names(configuration: Configuration) -> tuple[str, str]:
    return configuration.policy["type"], configuration.batcher["type"]


def print_table(hour: Hour) -> None:
    """The figures of the picture."""
    classes = _classes(hour.result)
    print(f"\n{hour.title}: TTFT p50 / p99 in s")
    print(f"{'':22}{'load':>6}" + "".join(f"{_label(edges):>24}" for edges in classes))
    for each in hour.result.configurations:
        for load_ppm, summary in each.summaries.items():
            cells = []
            for edges in classes:
                of_class = next((found for found in summary.classes if _edges(found) == edges), None)
                ttft = of_class.latencies.get("ttft") if of_class is not None else None
                cells.append("-" if ttft is None else f"{ttft.p50 / 1e9:,.2f} / {ttft.p99 / 1e9:,.2f}")
            print(f"{each.name:22}{load_ppm / 1e6:6g}" + "".join(f"{cell:>24}" for cell in cells))


def main() -> int:
    """Simulate what is missing, draw, and print the figures; 1 if a simulation failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", metavar="W.jsonl", help="the Azure hour as a workload file")
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--picture", metavar="FILE", help="default: DIR/azure.png")
    parser.add_argument("--cost-model", default="a100-llama3-8b", metavar="MODEL")
    parser.add_argument("--loads", default="1,1.5,2", metavar="X,...", help="for the hour as it was")
    parser.add_argument("--long-loads", default="0.6,0.9,1.2", metavar="X,...", help="with the long prompts")
    parser.add_argument("--long-share", type=float, default=0.005, metavar="X", help="of the requests")
    parser.add_argument("--long-tokens", type=int, default=64_000, metavar="N")
    parser.add_argument("--minutes", type=float, default=0, metavar="X", help="only the first ones, to try it")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    cost = load_cost_model(arguments.cost_model)
    assert isinstance(cost, LinearCost | RooflineCost)
    source = read_lines(Path(arguments.workload), arguments.minutes)
    recorded, mixed = folder / "as_recorded.jsonl", folder / "with_long_prompts.jsonl"
    write_workload(recorded, source.header, source.lines)
    add_long_prompts(source, mixed, share=arguments.long_share, num_tokens=arguments.long_tokens)
    span = f"first {arguments.minutes:g} minutes of the Azure hour" if arguments.minutes else "Azure hour"
    long = f"a prompt of {arguments.long_tokens:,} tokens beside {arguments.long_share:.1%} of its requests"
    hours = [
        Hour(f"The {span} as recorded", sweep(recorded, arguments.loads, arguments, cost)),
        Hour(f"The {span} with {long} (added)", sweep(mixed, arguments.long_loads, arguments, cost)),
    ]
    for hour in hours:
        print_table(hour)
    picture = Path(arguments.picture) if arguments.picture else folder / "azure.png"
    draw(
        hours, picture, f"simulated with the cost model {arguments.cost_model}, one replica; arrivals at several speeds"
    )
    print(f"\nwrote {picture}, {picture.stat().st_size:,} bytes")
    errors = [error for hour in hours for each in hour.result.configurations for error in each.errors.values()]
    for error in errors:
        print(f"failed: {error}")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
