"""Runs one section, in a process of its own:

    python -m benchmarks.gpu_harness.run_one CONTEXT OUTPUT

reads a `Context` and appends a `Began` or a `Found` to the file OUTPUT, a line each, as it goes. Exit code 3: an error
has left the device unusable for this process; what has not begun is to be run by another one.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import BinaryIO, Union

import msgspec
from msgspec import Struct, structs

from benchmarks.gpu_harness.row import Context, Part, Parts, Row, SectionError, Skip

DEVICE_LOST = 3
#: Errors of torch and Triton after a kernel has failed. The next CUDA call raises one, and so does every later call.
_OF_THE_DEVICE = ("CUDA error", "Triton Error [CUDA]")


class Began(Struct, frozen=True, tag_field="t", tag="began"):
    """A part has begun."""

    part: str


class Found(Struct, frozen=True, tag_field="t", tag="found"):
    """A part has found something."""

    row: Row


Line = Union[Began, Found]  # noqa: UP007


def run(context: Context, output: BinaryIO) -> int:
    """All parts that are not to be skipped; the exit code."""
    parts: Parts = importlib.import_module(context.module).parts(context)
    for name, part in parts.items():
        if name not in context.skip:
            _write(output, Began(name))
            if not _run_part(context, name, part, output):
                return DEVICE_LOST
    return 0


def _run_part(context: Context, name: str, part: Part, output: BinaryIO) -> bool:
    """Whether the device can still be used."""
    try:
        for row in part():
            # Times of an interpreter say nothing.
            is_judged = row.is_result or not context.smoke
            _write(output, Found(row if is_judged else structs.replace(row, outcome="measured")))
    except Skip as reason:
        _write(output, Found(Row(what=name, outcome="skipped", note=str(reason))))
    except SectionError as error:
        _write(output, Found(Row(what=name, outcome="failed", note=str(error))))
    except Exception as error:
        traceback.print_exc()
        _write(output, Found(Row(what=name, outcome="failed", note=in_one_line(error))))
        return not any(name in str(error) for name in _OF_THE_DEVICE)
    return True


def in_one_line(error: BaseException) -> str:
    """An error for a cell of the table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _write(output: BinaryIO, line: Line) -> None:
    output.write(msgspec.json.encode(line) + b"\n")
    output.flush()


def main() -> int:
    """Run the section that the command line names."""
    context = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Context)
    with Path(sys.argv[2]).open("ab") as output:
        return run(context, output)


if __name__ == "__main__":
    sys.exit(main())
