"""`eventlm debug`: go to any event of a recorded run, forwards and backwards, and look at the state there."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from eventlm.cli.output import SECONDS_BEFORE_BAR, count_progress, file_progress, warn
from eventlm.cli.parser import Parser, exit_code_lines
from eventlm.cli.trace_path import add_trace_argument, add_trust_flag, trace_file
from eventlm.errors import EventLMError, ExitCode
from eventlm.formatting import printable

if TYPE_CHECKING:
    from eventlm.replay.debugger.session import Session

#: In the state folder.
HISTORY_NAME = "debug_history"
LEAVING = ("quit", "exit", "q")
_CODES = (
    ExitCode.OK,
    ExitCode.USAGE,
    ExitCode.DAMAGED,
    ExitCode.DIFFERENT,
    ExitCode.INVARIANT,
    ExitCode.LIVENESS,
    ExitCode.VERSION,
    ExitCode.INTERRUPTED,
)


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Go to any event of a recorded run, forwards and backwards, and look at the scheduler's state there: who waits "
        "and runs, who holds the blocks, what every step had in it. Conditions find the place. Nothing changes the run."
    )
    parser.epilog = """\
examples:
  eventlm debug                                      the newest run, at a prompt
  eventlm debug runs/latest -c "find free < 5 and running > 3" -c "show queue"
  eventlm debug -c "goto request 1043 first" -c "story 1043"
  eventlm debug -c 'find event == "preempt"' -c "back drain" -c "show running"
  echo '{"id": 1, "command": "goto 12.5s"}' | eventlm debug --json

at the prompt: `next`, `back`, `goto 12.5s`, `find EXPR`, `break EXPR` and `cont`,
`watch EXPR`, `show queue`; `help` lists all, Tab completes, Ctrl-C ends what
takes too long and keeps the position.

A position is an event, and the state is the one after it; at a decision it is
the state after its fact. A run is indexed when it is first opened, at some
5 MB of trace a second, and opens at once from then on.

""" + exit_code_lines(*_CODES)
    add_trace_argument(parser, can_be_strict=False)
    parser.add_argument(
        "-c", "--command", metavar="COMMAND", action="append", help="run a command, then leave; can be repeated"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help='print one JSON object for each command; without -c, read commands as objects, {"id": 1, "command": '
        '"next"}, one a line of standard input; an interrupt (SIGINT) ends the command under way, not the session',
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="do not replay the run, as for one of other plug-ins: without states, and of blocks only those held",
    )
    parser.add_argument("--partial", action="store_true", help="of a damaged trace, show what precedes the damage")
    parser.add_argument("--no-history", action="store_true", help="do not keep what is typed at the prompt")
    add_trust_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Open the run, and obey the commands."""
    from eventlm.replay.debugger.session import Session

    path = trace_file(arguments.path)
    with file_progress("indexing", path) as on_progress:
        session = Session.open(
            path,
            verify=not arguments.no_verify,
            trust_local_plugins=arguments.trust_local_plugins,
            partial=arguments.partial,
            on_progress=on_progress,
        )
    with session:
        warn(session.index.facts.warnings)
        if session.index.facts.missing and not arguments.no_verify:
            warn([session.index.facts.missing])
        if arguments.json:
            return _serve_json(session, arguments.command)
        if arguments.command is None and sys.stdin.isatty():
            return _converse(session, keeps_history=not arguments.no_history)
        return _run_all(session, sys.stdin if arguments.command is None else arguments.command)


def _run_all(session: Session, commands: Iterable[str]) -> int:
    """Run commands in order, up to the first that fails; its exit code."""
    for command in commands:
        if command.strip() in LEAVING:
            break
        if command.strip() and not command.lstrip().startswith("#"):
            code = _run(session, command)
            if code:
                return code
    return ExitCode.OK


def _run(session: Session, command: str) -> int:
    """Run a command and print its result, or its error."""
    from eventlm.replay.expressions.errors import ExpressionError

    try:
        with _interruptible(session), count_progress("working", "event", delay=SECONDS_BEFORE_BAR) as on_progress:
            session.interrupt.on_progress = on_progress
            result = session.execute(command)
        # Texts of a trace may come from anybody.
        print("\n".join(map(printable, result.lines())))
    except ExpressionError as error:
        print(f"eventlm: error: {error}", file=sys.stderr)
        print(f"  {error.pointer}".replace("\n", "\n  "), file=sys.stderr)
        return error.exit_code
    except EventLMError as error:
        print(f"eventlm: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return error.exit_code
    return ExitCode.OK


def _converse(session: Session, *, keeps_history: bool) -> int:
    """Read commands at a prompt."""
    from eventlm.cli.debug.prompt import DebugPrompt
    from eventlm.config.state_folder import state_folder

    prompt = DebugPrompt(state_folder() / HISTORY_NAME if keeps_history else None)
    _run(session, "info")
    print("`help` lists the commands; Ctrl-D leaves")
    last = ""
    while (line := prompt.read(session.position)) is not None:
        command = line.strip()
        # As in other debuggers an empty line repeats a move.
        if not command:
            command = last if last.split(" ", 1)[0] in ("next", "n", "back", "b") else ""
        if command in LEAVING:
            break
        if command:
            last = command
            with contextlib.suppress(KeyboardInterrupt):
                _run(session, command)
    return ExitCode.OK


def _serve_json(session: Session, commands: list[str] | None) -> int:
    """Answer each request with a line. With -c the exit code is that of the first command that fails."""
    import msgspec

    from eventlm.replay.debugger.protocol import DebugRequest, encode, respond

    requests: Iterable[bytes] = (
        (line for line in sys.stdin.buffer if line.strip())
        if commands is None
        else (msgspec.json.encode(DebugRequest(id=number, command=each)) for number, each in enumerate(commands, 1))
    )
    # A program cannot know whether its interrupt comes while the command still runs.
    with _uninterrupted() if commands is None and not sys.stdin.isatty() else contextlib.nullcontext():
        for request in requests:
            with _interruptible(session):
                response = respond(session, request)
            sys.stdout.buffer.write(encode(response))
            sys.stdout.buffer.flush()
            if commands is not None and response.error is not msgspec.UNSET:
                return response.error.exit_code
    return ExitCode.OK


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGINT does nothing. Not SIG_IGN, for which Python warns of a signal that came before it was set."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _interruptible(session: Session) -> Iterator[None]:
    """Ctrl-C ends the command between two events; pressed again, at once."""
    is_requested = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested:
            raise KeyboardInterrupt
        is_requested = True
        session.cancel()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
