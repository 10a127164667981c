"""Tables of what `benchmarks/gpu.py` found.

python benchmarks/gpu_harness/report.py [results/gpu.json]      Markdown
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
from msgspec import Struct

from benchmarks.gpu_harness.row import Row
from eventlm.table import table

COLUMNS = ("section", "what", "measured", "limit or peer", "ratio", "target", "outcome", "note")
#: The first of them say what is measured; these go to the left.
NUM_NAMES = 2


class Report(Struct, frozen=True, kw_only=True):
    """A run: `seconds` is how long it took, `versions` are of Python and of packages."""

    smoke: bool
    versions: dict[str, str]
    seconds: float
    rows: list[Row]


def encode(report: Report) -> bytes:
    """A report as its file has it."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read(path: Path) -> Report:
    """The report in a file. Raises OSError and msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def render(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the table for a terminal."""
    yield from table(COLUMNS[:-1], [cells(row)[:-1] for row in rows], left=range(NUM_NAMES))
    for row in rows:
        if row.note and row.outcome in ("failed", "skipped"):
            yield f"{row.outcome}: {row.section}, {row.what}: {row.note}"


def render_markdown(report: Report) -> Iterator[str]:
    """The lines of the table in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield f"{_device(report.rows)}; {versions}{'; a smoke run, whose times say nothing' if report.smoke else ''}"
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|---|" + "---:|" * (len(COLUMNS) - NUM_NAMES - 2) + "---|---|"
    for row in report.rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells(row))} |"


def one_line(row: Row) -> str:
    """A row as progress."""
    _, what, measured, limit, ratio, target, outcome, note = cells(row)
    beside = f" = {ratio} of {limit}" if ratio else ""
    wanted = f", target {target}" if target else ""
    return f"  {what}: {measured}{beside}{wanted}: {outcome}{f' ({note})' if note else ''}"


def cells(row: Row) -> list[str]:
    """One for each of COLUMNS."""
    limit = f"{number(row.limit)} {row.unit} {row.limit_name}".strip() if row.limit is not None else row.limit_name
    sign = "<=" if row.is_at_most else ">="
    target = f"{sign} {number(row.target)}" if row.target is not None else ""
    ratio = f"{row.ratio:.3g}" if row.ratio is not None else ""
    measured = f"{number(row.measured)} {row.unit}".strip() if row.measured is not None else ""
    return [row.section, row.what, measured, limit, ratio, target, row.outcome, row.note]


def number(value: float) -> str:
    """Three or four digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _device(rows: Sequence[Row]) -> str:
    return next((row.note for row in rows if row.section == "ceilings" and row.note), "a device that is not known")


def main() -> int:
    """Print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path("results/gpu.json"))
    arguments = parser.parse_args()
    try:
        report = read(arguments.file)
    except (OSError, msgspec.DecodeError) as error:
        print(f"report.py: {arguments.file} cannot be read: {error}", file=sys.stderr)
        return 1
    print("\n".join(render_markdown(report)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
