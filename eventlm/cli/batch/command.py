"""`eventlm batch run FILE -o OUT`: the requests in a file, run as `/v1/batches` would, without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventlm.cli.config_flags import add_config_flags, add_flag, with_config
from eventlm.cli.engine_command import compose_and_warn, run_in_loop, run_until_signal
from eventlm.cli.output import count_progress
from eventlm.cli.parser import Parser, exit_code_lines
from eventlm.config import Config
from eventlm.config.options import options
from eventlm.errors import ExitCode, UsageError
from eventlm.formatting import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from eventlm.bootstrap.composition import Composition
    from eventlm.server.api import Api
    from eventlm.server.batches.lines import InputLine, OutputLine
    from eventlm.server.batches.results import Results
    from eventlm.server.context import ServerContext

#: The options of [server] that change replies.
_OF_REPLIES = ("pooling", "tool_parser", "reasoning_parser")
_EXITS = {
    ExitCode.OK: "all requests succeeded",
    ExitCode.FAILED: "some failed, or it could not go on; --resume runs those that have no result",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C; --resume goes on",
}


def configure(parser: Parser) -> None:
    """Add the command's subcommands."""
    parser.description = "Run the requests in a file here and now, without a server."
    parser.epilog = """\
examples:
  eventlm batch run requests.jsonl -o results.jsonl
  eventlm batch run requests.jsonl -o results.jsonl --resume"""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _configure_run(actions.add_parser("run", help="run the requests in a file of OpenAI's batch format"))


def _configure_run(parser: Parser) -> None:
    parser.description = (
        "Run the requests in a file of OpenAI's batch format. Each line of FILE is a request, and gets a line in\n"
        "OUT as soon as it is over, as in the output and error files of /v1/batches. A line that is wrong or fails\n"
        "gets an error; the others go on. Ctrl-C keeps what is done."
    )
    parser.usage = "eventlm batch run FILE -o OUT [--errors FILE] [--resume] [flags]"
    parser.epilog = """\
examples:
  eventlm batch run requests.jsonl -o results.jsonl
  eventlm batch run requests.jsonl -o results.jsonl --errors errors.jsonl
  eventlm batch run requests.jsonl -o results.jsonl --resume

A line of FILE:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]}}

""" + exit_code_lines(ExitCode.USAGE, meanings=_EXITS)
    parser.add_argument("file", metavar="FILE", help="the requests, a JSON object in each line")
    parser.add_argument(
        "-o", "--output", metavar="OUT", required=True, help="the results file, with a line for each request"
    )
    parser.add_argument(
        "--errors", metavar="FILE", help="a results file of their own for requests that failed (default: OUT)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the results file: requests that are in it, failed ones too, are not run again",
    )
    group = parser.add_argument_group("replies ([server] in the TOML file)")
    for name in _OF_REPLIES:
        add_flag(group, options()[name])
    add_config_flags(parser, without=("server", "gateway"))
    parser.set_defaults(run=with_config(run))


def run(config: Config, arguments: argparse.Namespace) -> int:
    """Run the lines; 1 if any of them failed."""
    from eventlm.server.app import APIS_BY_PREFIX
    from eventlm.server.batches.worker import apis_by_path

    apis = apis_by_path(APIS_BY_PREFIX)
    results = _open_results(arguments)
    try:
        num_lines = _check_lines(arguments.file, apis, config, results)
        num_failed_before = results.counts.failed
        code: int = ExitCode.OK
        first_errors: list[str] = []
        if len(results.ended) < num_lines:
            code = run_in_loop(config, _run(config, arguments, apis, results, num_lines, first_errors))
    finally:
        results.close()
    done = results.counts
    words = [f"{counted(done.completed, 'request')} done, {done.failed:,} failed, of {num_lines:,}", *first_errors]
    if num_failed_before:
        verb = "was" if num_failed_before == 1 else "were"
        words.append(f"{counted(num_failed_before, 'request')} that failed before {verb} not run again")
    if done.failed:
        words.append(f"all errors are in {arguments.errors or arguments.output}")
    for each in words:
        print(f"eventlm: {each}", file=sys.stderr)
    if code != ExitCode.OK:
        return code
    return ExitCode.FAILED if done.failed else ExitCode.OK


def _open_results(arguments: argparse.Namespace) -> Results:
    """The files to write. Raises UsageError if they exist already, or cannot be resumed."""
    from eventlm.server.batches.results import Results
    from eventlm.system.disk import SYSTEM_DISK

    output = Path(arguments.output)
    errors = Path(arguments.errors) if arguments.errors else output
    if not Path(arguments.file).is_file():
        raise UsageError(f"cannot read {arguments.file}: it is no file")
    for path in (output, errors):
        if path.exists() and not arguments.resume:
            raise UsageError(f"{path} exists: give --resume to go on with it, or another file, or remove it")
        if path.exists() and path.samefile(arguments.file):
            raise UsageError(f"{path} is the input; give another file for the results")
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    results = Results(SYSTEM_DISK, output, errors)
    try:
        results.open()
    except BlockingIOError:
        raise UsageError(f"cannot resume {output}: another process is writing it") from None
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error
    except ValueError:
        raise UsageError(f"cannot resume {output}: it is no output of a batch") from None
    return results


def _lines(path: str, apis: Mapping[str, Api[Any]], config: Config) -> Iterator[InputLine]:
    """Raises UsageError for a file that cannot be read."""
    from eventlm.server.batches.lines import read_lines
    from eventlm.system.disk import SYSTEM_DISK

    try:
        file = SYSTEM_DISK.open(Path(path))
        try:
            yield from read_lines(file, apis, max_bytes=config.server.max_body_bytes)
        finally:
            file.close()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _check_lines(path: str, apis: Mapping[str, Api[Any]], config: Config, results: Results) -> int:
    """How many lines there are. Raises UsageError if none can be run, or if the results are those of other lines."""
    num_lines, first_error, num_valid = 0, "it is empty", 0
    for line in _lines(path, apis, config):
        num_lines += 1
        if line.error is None:
            num_valid += 1
        elif num_lines == 1:
            first_error = line.error.message
        if results.ended.get(line.number, line.custom_id) != line.custom_id:
            raise UsageError(f"cannot resume: line {line.number} of {path} is not the one that the results have")
    if not num_valid:
        raise UsageError(f"no line of {path} can be run: {first_error}")
    return num_lines


async def _run(
    config: Config,
    arguments: argparse.Namespace,
    apis: Mapping[str, Api[Any]],
    results: Results,
    num_lines: int,
    first_errors: list[str],
) -> int:
    """first_errors: gets the first error."""
    composed = compose_and_warn(config)
    context = _context(config, composed)
    with count_progress("requests", "request") as on_progress:

        def note(line: OutputLine) -> None:
            if not first_errors and (message := line.error_message):
                first_errors.append(f"the first error: {message}")
            if on_progress is not None:
                on_progress(results.counts.completed + results.counts.failed, num_lines)

        work = _run_lines(context, apis, config, _lines(arguments.file, apis, config), results, note)
        code = await run_until_signal(composed.engine, work)
    await context.close()
    results.finish()
    if code == ExitCode.OK and composed.engine.run_folder is not None:
        print(f"eventlm: recorded to {composed.engine.run_folder}/trace.jsonl", file=sys.stderr)
    return code


def _context(config: Config, composed: Composition) -> ServerContext:
    from eventlm.config import ServerConfig
    from eventlm.server.context import ServerContext
    from eventlm.system.system import real_system

    return ServerContext(
        real_system(),
        composed.engine,
        composed.tokenizer,
        ServerConfig(**{name: getattr(config.server, name) for name in _OF_REPLIES}),
        defaults=composed.defaults,
        vocab_size=composed.vocab_size,
        facts=composed.facts,
        classes=config.classes,
    )


async def _run_lines(
    context: ServerContext,
    apis: Mapping[str, Api[Any]],
    config: Config,
    lines: Iterator[InputLine],
    results: Results,
    note: Callable[[OutputLine], None],
) -> None:
    from eventlm.server.auth.api_keys import ANYBODY
    from eventlm.server.batches.line_runner import LineRunner
    from eventlm.server.batches.window import Window

    scheduler = config.scheduler
    # The next ones are ready when others end.
    window = Window(2 * scheduler.replicas * scheduler.max_num_seqs * config.parallel.decode_batches)
    runner = LineRunner(
        context,
        apis,
        window,
        lambda: ANYBODY,
        batch_id="batch",
        prefix="batch_req_",
        # The queue's length is for clients.
        scheduling={"offline": True},
    )

    async def record(line: OutputLine) -> None:
        results.add(line)
        note(line)

    await runner.run(lines, frozenset(results.ended), record)
