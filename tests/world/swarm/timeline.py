"""Writes what happened in a run as one list, and the files of its disk, for `eventlm report` and the like."""

from __future__ import annotations

from pathlib import Path

from tests.world.machine.file_tree import File, Folder, Link
from tests.world.machine.world import World
from tests.world.programs.server import RUNS

NAME = "timeline.txt"


def write_timeline(folder: Path, world: World, outcome: str) -> None:
    """Write `timeline.txt`, and beside it the traces as they are on the simulated disk."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = world.notes or []
    begin_ns = notes[0].time_ns if notes else 0
    width = max((len(note.who) for note in notes), default=0)
    text = [f"{(note.time_ns - begin_ns) / 1e9:14.6f}  {note.who:{width}}  {note.what}" for note in notes]
    head = [f"seed {world.draws.seed}: {outcome.rstrip()}", f"traces: {folder / RUNS.name}", ""]
    (folder / NAME).write_text("\n".join([*head, *text, ""]))
    runs = world.disk.tree.place(RUNS).node
    if isinstance(runs, Folder):
        _copy(runs, folder / RUNS.name)


def _copy(source: Folder, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for name, node in source.entries.items():
        match node:
            case Folder():
                _copy(node, target / name)
            case File():
                (target / name).write_bytes(node.content)
            case Link():
                (target / name).unlink(missing_ok=True)
                (target / name).symlink_to(node.target)
