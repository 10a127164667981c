"""The error of tools that need a run to be what its replay makes of it."""

from __future__ import annotations

from eventlm.bus.log_reader import LogLine
from eventlm.errors import EventLMError
from eventlm.replay.verify.verifier import Found


class DivergenceError(EventLMError):
    """The trace diverges from its replay. `exit_code` is that of the divergence."""

    @classmethod
    def at(cls, path: str, line: LogLine, found: Found, drift: list[str], consequence: str) -> DivergenceError:
        """The error for a difference at a line. drift: plug-ins that are not those that ran. consequence: what that
        means for the tool."""
        because = f" ({'; '.join(drift)})" if drift else ""
        return cls(
            f"{path} diverges from its replay: at event {line.s} {found.what}{because}; {consequence}, "
            f"`eventlm replay {path}` shows details",
            exit_code=found.code.value.exit_code,
        )
