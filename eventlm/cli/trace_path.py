"""Where a trace lies: a file, the folder of a run, a run of the state folder by its name, or the newest there."""

from __future__ import annotations

from pathlib import Path

from eventlm.errors import UsageError

#: Stands for the newest run of the state folder, unless a file or folder here has that name.
LATEST = "latest"
HELP = (
    "a trace file, or the folder of a run with all its files, such as DIR/latest of `--record DIR`, or the name of a "
    "run in the state folder, as `eventlm trace ls` has it (default: latest, which is the newest run there)"
)


def trace_file(text: str) -> str:
    """The file, or where a run has several the folder, that a path stands for. Raises UsageError if there is none."""
    from eventlm.bus.run_folder import LATEST_NAME, TRACE_NAME, closed_segments

    path = Path(text)
    if not path.exists():
        path = _newest() if text == LATEST else _named(text)
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
    """The file that a run was last written to. Raises UsageError as `trace_file` does."""
    from eventlm.bus.run_folder import TRACE_NAME

    found = Path(trace_file(text))
    return str(found / TRACE_NAME if found.is_dir() else found)


def _named(text: str) -> Path:
    """The run of the state folder that has this name, else the path itself."""
    from eventlm.config.state_folder import runs_folder

    run = runs_folder() / text
    return run if Path(text).name == text and run.is_dir() else Path(text)


def _newest() -> Path:
    from eventlm.bus.run_folder import newest_run
    from eventlm.config.state_folder import runs_folder

    run = newest_run(runs_folder())
    if run is None:
        raise UsageError(
            f"no run is recorded in {runs_folder()}; give the path of a trace, such as DIR/latest of `--record DIR`"
        )
    # By its own name, which says when it was; `latest` may soon be another.
    return run.resolve()
