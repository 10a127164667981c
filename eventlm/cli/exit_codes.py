"""The lines of `--help` that list a command's exit codes."""

from __future__ import annotations

from eventlm.errors import ExitCode

#: Of every command that reads a trace.
READING_A_TRACE = (ExitCode.OK, ExitCode.USAGE, ExitCode.DAMAGED, ExitCode.TORN, ExitCode.VERSION)


def exit_code_lines(*codes: ExitCode, meanings: dict[ExitCode, str] | None = None) -> str:
    """A line for each code in ascending order, with its meaning or the one given for this command."""
    own = meanings or {}
    lines = [f"  {code.value:<3} {own.get(code, code.meaning)}" for code in sorted({*codes, *own})]
    return "\n".join(["exit codes:", *lines])
