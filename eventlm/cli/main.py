"""The program `eventlm`: find the command, load only its module, turn errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from eventlm._version import __version__
from eventlm.cli.parser import Parser
from eventlm.errors import EventLMError, ExitCode, UsageError
from eventlm.formatting import sentence

#: The module of each command, below `eventlm.cli`, has a `configure(parser)` that sets `run`. They import the engine,
#: the core and the like only inside `run`, so that help and mistakes are fast.
COMMANDS = {
    "serve": ("serve.command", "serve a model over an OpenAI-compatible HTTP API"),
    "chat": ("chat.command", "talk to a model in the terminal"),
    "generate": ("generate", "complete prompts here and now, without a server"),
    "batch": ("batch.command", "run a file of requests here and now, without a server"),
    "bench": ("bench.command", "measure a server under load, or the engine by itself"),
    "pull": ("pull", "fetch a model into the cache and print its folder"),
    "replay": (
        "replay.command",
        "verify a recorded run, run it again, or ask what another engine would have made of it",
    ),
    "branch": ("branch", "continue a recorded run from a point of it under another policy or limit"),
    "explain": ("explain.command", "show where the time of a request went"),
    "report": ("report.command", "make a page of a recorded run: what is wrong with it, timeline, latencies"),
    "view": ("view.command", "show a run in the browser, with its debugger"),
    "debug": (
        "debug.command",
        "go to any event of a recorded run, forwards and backwards, and look at the state there",
    ),
    "simulate": ("simulate.command", "run a workload through the scheduler, with a cost model for a worker"),
    "sweep": ("sweep.command", "simulate many configurations and loads, and find what each can take"),
    "shrink": ("shrink.command", "make a workload as small as it can be while it still shows a problem"),
    "bisect": ("bisect.command", "find the event, the value or the setting where something begins"),
    "trace": ("trace.command", "find, look at, compare or repair recorded runs"),
    "monitoring": ("monitoring", "write a Grafana dashboard and Prometheus alerts for servers"),
    "policies": ("policies", "list the installed policies, batchers and routers"),
    "version": ("version", "print versions of eventlm and what it runs on"),
}

#: The system's errors when there is no more room for a file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` if none is given) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except EventLMError as error:
        print(f"eventlm: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        if arguments and arguments[0] == "bench":
            from eventlm.bench.launcher import end_launched

            # Other commands are no part of what a launcher started together.
            end_launched(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone.
        _drop_output()
        return ExitCode.BROKEN_PIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        print(f"eventlm: error: cannot write {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return ExitCode.FAILED


def _drop_output() -> None:
    """Otherwise the interpreter's own flush of what cannot be written would fail at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str]) -> int:
    for argument in arguments:
        if any("\udc80" <= character <= "\udcff" for character in argument):
            raise UsageError(f"the argument {argument!r} is not valid UTF-8")
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = _parser(command)
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    # Until now SIGINT ended the process, as there was nothing to clean up (`eventlm.__main__`).
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return int(options.run(options))


def _parser(command: str | None) -> Parser:
    """The program's parser, in which only `command` has its flags: the others' modules are not loaded."""
    parser = Parser(
        prog="eventlm",
        description="An inference engine for large language models that can be rewound: every step of a\n"
        "request is an event on one ordered log, which can be recorded, verified and replayed.",
        epilog="""\
examples:
  eventlm serve                                serve the default model
  eventlm generate "The capital of France is"  complete a prompt
  eventlm replay                               verify the newest recorded run

`eventlm COMMAND --help` explains a command.""",
    )
    parser.add_argument("--version", action="version", version=f"eventlm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=sentence(summary))
        if name == command:
            importlib.import_module(f"eventlm.cli.{module}").configure(subparser)
    return parser
