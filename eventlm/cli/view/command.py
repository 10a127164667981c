"""`eventlm view`: the page of a run with its debugger, served on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import webbrowser

from eventlm.cli.output import file_progress
from eventlm.cli.parser import Parser, add_number, exit_code_lines
from eventlm.cli.trace_path import add_trace_argument, add_trust_flag, trace_file
from eventlm.errors import ExitCode, UsageError

_LAST_PORT = 65_535


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Show a run in the browser: what is wrong with it, its timeline, its worst requests, and a debugger that "
        "steps through it in both directions and answers why. The page is served on this machine only, and only "
        "to those with the address and its token. A run that is still being written is followed."
    )
    parser.epilog = """\
examples:
  eventlm view                        the newest run, followed if it goes on
  eventlm view runs/latest --no-open  print the address, open no browser
  eventlm view trace.jsonl --speed 10 replay it at ten times its speed

Ctrl-C ends it. `eventlm report` writes the same page, without the debugger,
into one file that can be sent to others.

""" + exit_code_lines(
        ExitCode.OK,
        ExitCode.USAGE,
        ExitCode.DAMAGED,
        ExitCode.VERSION,
        ExitCode.DIFFERENT,
        ExitCode.INVARIANT,
        ExitCode.LIVENESS,
    )
    add_trace_argument(parser, can_be_strict=False)
    add_number(parser, "--port", "the port on this machine (default: a free one)", least=0)
    text = "replay from the start at X times the speed of the run"
    add_number(parser, "--speed", text, kind=float, least=0, default=0.0)
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument("--no-verify", action="store_true", help="read the log alone: quicker, without states")
    parser.add_argument("--partial", action="store_true", help="of a damaged trace show what precedes the damage")
    add_trust_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Returns the exit code."""
    from eventlm.look.view.access import new_token
    from eventlm.look.view.server import ViewServer, serve
    from eventlm.replay.debugger.session import Session

    if (arguments.port or 0) > _LAST_PORT:
        raise UsageError(f"--port {arguments.port}: ports end at {_LAST_PORT}")
    path = trace_file(arguments.path)
    with file_progress("indexing", path) as on_progress:
        session = Session.open(
            path,
            verify=not arguments.no_verify,
            trust_local_plugins=arguments.trust_local_plugins,
            partial=arguments.partial,
            on_progress=on_progress,
        )

    def announce(port: int) -> None:
        address = f"http://127.0.0.1:{port}/#token={token}"
        print(f"Open {address} (Ctrl-C stops)", flush=True)
        if not arguments.no_open:
            webbrowser.open(address)

    token = new_token()
    with session:
        server = ViewServer(session, token, speed=arguments.speed)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(server, arguments.port or 0, announce))
    return ExitCode.OK
