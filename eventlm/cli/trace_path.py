"""Where a trace lies: a file, the folder of a run, or the newest run of all."""

from __future__ import annotations

from pathlib import Path

from eventlm.errors import UsageError

#: Stands for the newest run of the state folder, unless a file or folder here has that name.
LATEST = "latest"
HELP = (
    "a trace file, or the folder of a run with all its files, such as DIR/latest of `--record DIR` "
    "(default: latest, which is the newest run in the state folder)"
)


def trace_file(text: str) -> str:
    """The file, or where a run has several the folder, that a path stands for. Raises UsageError if there is none."""
    from eventlm.bus.run_folder import LATEST_NAME, TRACE_NAME, closed_segments

    path = Path(text)
    if text == LATEST and not path.exists():
        path = _newest()
    if not path.is_dir():
        return str(path) if text == LATEST else text
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
