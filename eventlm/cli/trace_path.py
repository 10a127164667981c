"""A trace as an argument: a file, the folder of a run, a run of the state folder by its name, or the latest there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.errors import UsageError

if TYPE_CHECKING:
    from eventlm.events import PluginRecord

#: The run of the state folder that is still being written, else the newest, unless a file or folder here is called so.
LATEST = "latest"
HELP = (
    "a trace file, or the folder of a run with all its files, such as DIR/latest of `--record DIR`, or the name of a "
    "run in the state folder, as `eventlm trace ls` lists it (default: latest, the run there that is still being "
    "written, or else the newest)"
)


def add_trace_argument(parser: argparse.ArgumentParser, *, can_be_strict: bool = True) -> None:
    """Add the trace, the newest one if none is named, and `--strict`."""
    parser.add_argument("path", metavar="TRACE", nargs="?", default=LATEST, help=HELP)
    if can_be_strict:
        add_strict_flag(parser)


def add_strict_flag(parser: argparse.ArgumentParser) -> None:
    """`--strict`: a last line that a killed process left unfinished is an error."""
    parser.add_argument("--strict", action="store_true", help="a torn last line is an error (exit 4)")


def add_trust_flag(parser: argparse.ArgumentParser) -> None:
    """`--trust-local-plugins`, of commands that run the policies of a trace."""
    parser.add_argument(
        "--trust-local-plugins",
        action="store_true",
        help="import the plug-ins that the trace names as module:Class; do so only for traces that you trust",
    )


def plugin_in_words(plugin: PluginRecord) -> str:
    """`policy edf:multiplier=2`, with all parameters that it ran with: its defaults are known only by importing it."""
    return f"{plugin.kind} {format_plugin_spec({'type': plugin.name} | plugin.parameters)}"


def trace_file(text: str) -> str:
    """The file, or where a run has several the folder, that a path stands for. Raises UsageError if there is none."""
    from eventlm.bus.run_folder import LATEST_NAME, TRACE_NAME, closed_segments

    path = Path(text)
    if not path.exists():
        path = _latest() if text == LATEST else _named(text)
    if not path.is_dir():
        return text
    if closed_segments(path):
        return str(path)
    if not (path / TRACE_NAME).is_file():
        newest = path / LATEST_NAME / TRACE_NAME
        hint = f"the newest run in it is {newest.parent}" if newest.is_file() else "name the folder of a run"
        raise UsageError(f"the folder {text} holds no {TRACE_NAME}; {hint}")
    return str(path / TRACE_NAME)


def last_file(text: str) -> str:
    """The last file of a run. Raises UsageError as `trace_file` does."""
    from eventlm.bus.run_folder import TRACE_NAME

    found = Path(trace_file(text))
    return str(found / TRACE_NAME if found.is_dir() else found)


def _named(text: str) -> Path:
    """The run of the state folder that has this name, else the path itself."""
    from eventlm.config.state_folder import runs_folder

    run = runs_folder() / text
    return run if Path(text).name == text and run.is_dir() else Path(text)


def _latest() -> Path:
    """The newest run that is still being written, else the newest of all; says on stderr which one it is."""
    from eventlm.bus.run_folder import newest_run, newest_running
    from eventlm.config.state_folder import runs_folder

    folder = runs_folder()
    running = newest_running(folder)
    run = running or newest_run(folder)
    if run is None:
        raise UsageError(
            f"no run is recorded in {folder}; give the path of a trace, such as DIR/latest of `--record DIR`"
        )
    # By its own name, which says when it was; `latest` may soon be another.
    run = run.resolve()
    print(f"eventlm: run {run.name}, {'still running' if running else 'the newest'}", file=sys.stderr)
    return run
