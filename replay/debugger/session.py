"""A session of the debugger: a run, a position in it, and commands.

    from eventlm.replay.debugger.session import Session

    with Session.open("runs/latest") as session:
        stop = session.execute("find free < 5 and running > 3")
        print("\\n".join(stop.lines()))
        print(session.core.state.policy_name)

Nothing that a session does changes the run.
"""

from __future__ import annotations

from pathlib import Path

from eventlm.replay.debugger.commands import run_command
from eventlm.replay.debugger.navigator import Navigator
from eventlm.replay.debugger.results import Result
from eventlm.replay.index.live import LiveIndex
from eventlm.types import OnProgress


class Session(Navigator):
    """Begins at the first event. Commands are those of `eventlm.replay.debugger.commands`."""

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        verify: bool = True,
        trust_local_plugins: bool = False,
        partial: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Session:
        """A session on a trace, a file or the folder of a run. One that is still being written is read on.

        verify, trust_local_plugins, partial: as of `eventlm.replay.index.open.open_index`, and so are the errors.
        on_progress: gets bytes read and in all while the run is indexed for the first time.
        """
        live = LiveIndex(
            path, verify=verify, trust_local_plugins=trust_local_plugins, partial=partial, on_progress=on_progress
        )
        return cls(live.index, live=live, trusts_plugins=trust_local_plugins)

    def execute(self, command: str) -> Result:
        """Run a command, as it is typed. The position changes only if it succeeds.

        Raises UsageError, ExpressionError (one with a column) among them, and InterruptedCommandError.
        """
        return run_command(self, command)

    def cancel(self) -> None:
        """End the command that is under way; from a handler of a signal or another thread."""
        self.interrupt.request()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
