"""`eventlm bench serve`: its flags, its progress, its report."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventlm.cli.bench.engine import LENGTH_HELP
from eventlm.cli.engine_command import StopSignals
from eventlm.cli.output import print_report
from eventlm.cli.parser import Parser, add_number, exit_code_lines
from eventlm.config.load import API_KEY_VARIABLE
from eventlm.errors import EventLMError, ExitCode, UsageError

if TYPE_CHECKING:
    from eventlm.bench.ranks import Ranks
    from eventlm.bench.records import RequestRecord
    from eventlm.bench.serve_bench import ServeOptions, ServeResult

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_INPUT_LENGTH = "256"
DEFAULT_OUTPUT_LENGTH = "128"
_NOTHING_SENT = "eventlm: interrupted before anything was sent"


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = """\
Put a load on a server that speaks OpenAI's API and report latencies, rates and goodput.

Open loop (the default): requests are sent at times of their own, by --request-rate or --trace, whatever the
server does; latencies count from the time at which a request was meant to be sent. Closed loop:
--max-concurrency without a rate; a request is sent when another has ended, and latencies count from the sending.

TTFT is the time to the first event with text, e2e that to the last event, TPOT (e2e - TTFT) / (output tokens - 1),
inter-token the time between two events with text, over all requests: as in `vllm bench serve`. Token counts
are the server's. Rates are of successful requests, from the start to the last event.

--retries is for HTTP 408, 425, 429 and 5xx, for connections that fail or break off, and for timeouts. A request that
waits for its next attempt keeps its place, and its latencies count from the first attempt.

With --mpi, the ranks that mpiexec starts put one load on the server, and the report is of all of them. Rates and
--max-concurrency are those of all ranks together."""
    parser.usage = "eventlm bench serve [--url URL] [--request-rate R] [flags]"
    parser.epilog = """\
examples:
  eventlm bench serve --request-rate 4 --num-prompts 200 --slo ttft=500,tpot=50
  eventlm bench serve --max-concurrency 16 --duration 60 --output results
  eventlm bench serve --request-rate 2 --arrivals gamma --burstiness 0.3 \\
    --input-len lognormal:median=300,sigma=0.8
  eventlm bench serve --dataset FILE.jsonl --endpoint chat --max-concurrency 4
  eventlm bench serve --prefix-len 512 --num-prefixes 4 --request-rate 8
  eventlm bench serve --trace FILE.csv   (arrival_s,prompt_tokens,output_tokens)
  mpiexec -n 4 eventlm bench serve --mpi --inflight 64 --duration 60 --retries 3

""" + exit_code_lines(
        ExitCode.OK,
        ExitCode.USAGE,
        meanings={
            ExitCode.FAILED: "no request succeeded or the server went away",
            ExitCode.INTERRUPTED: "interrupted (with a report)",
        },
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_prompt_flags(parser.add_argument_group("prompts"))
    _add_ranks_flags(parser.add_argument_group("ranks and kernels"))
    _add_result_flags(parser.add_argument_group("results"))
    parser.set_defaults(run=run)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default=DEFAULT_URL, help=f"the server, with or without /v1 (default: {DEFAULT_URL})")
    group.add_argument("--model", default="", metavar="NAME", help="model to ask for (default: the first one served)")
    group.add_argument(
        "--endpoint", choices=("auto", "completions", "chat"), default="auto", metavar="NAME",
        help="completions or chat (default: completions, or chat if the data set has messages)",
    )  # fmt: skip
    group.add_argument(
        "--api-key", default="", metavar="KEY", help=f"bearer token; better set {API_KEY_VARIABLE} in the environment"
    )
    add_number(
        group, "--timeout", "silence of the server after which a request has failed (default: 600)",
        kind=float, above=0, dest="timeout_s", default=600.0, metavar="SECONDS",
    )  # fmt: skip
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON",
        help='object that goes into every body, such as {"service_tier": "gold"}',
    )  # fmt: skip


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    text = "requests per second that arrive (default: inf, all at once)"
    add_number(group, "--request-rate", text, kind=float, above=0, default=math.inf, metavar="R")
    group.add_argument(
        "--arrivals", choices=("poisson", "gamma", "constant"), metavar="PROCESS",
        help="poisson, gamma (with --burstiness) or constant (default: poisson)",
    )  # fmt: skip
    add_number(group, "--burstiness", "shape of gamma arrivals: 1 is poisson, less is burstier", kind=float, above=0)
    group.add_argument("--trace", metavar="FILE", help="CSV or JSON lines with times and lengths")
    add_number(group, "--max-concurrency", "most requests under way at once, of all ranks together", least=1)
    add_number(group, "--inflight", "the same for each rank: most requests that it has under way", least=1, metavar="N")
    add_number(group, "--num-prompts", "requests to send (default: 100, or the whole data set or trace)", least=1)
    text = "stop sending after this long; requests in flight may finish"
    add_number(group, "--duration", text, kind=float, above=0, dest="duration_s", metavar="SECONDS")
    add_number(group, "--warmup", "requests before the measured ones", least=0, dest="num_warmups")
    text = "most further attempts of a request that fails before its answer begins (default: 0)"
    add_number(group, "--retries", text, least=0, metavar="N")
    text = "wait before the second attempt; it doubles each time, and Retry-After is added (default: 200)"
    add_number(group, "--retry-backoff-ms", text, kind=float, least=0, metavar="MS")
    add_number(group, "--seed", "prompts and arrivals follow from it", least=0)


def _add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input-len", metavar="LENGTH", help=f"prompt tokens: {LENGTH_HELP} (default: {DEFAULT_INPUT_LENGTH})"
    )
    group.add_argument(
        "--output-len", default=DEFAULT_OUTPUT_LENGTH, metavar="LENGTH",
        help=f"most output tokens, likewise (default: {DEFAULT_OUTPUT_LENGTH})",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", action="store_true", help="generate the full output length, past end-of-text tokens"
    )
    text = "tokens that prompts share, on top of --input-len"
    add_number(group, "--prefix-len", text, least=1, dest="prefix_tokens")
    add_number(group, "--num-prefixes", "how many such prefixes there are (default: 1)", least=1)
    group.add_argument(
        "--dataset", metavar="FILE",
        help="prompts from a file: .txt (one a line), .jsonl (prompt or messages), .json (such a list, or ShareGPT)",
    )  # fmt: skip
    group.add_argument("--shuffle", action="store_true", help="take the data set in a random order")
    group.add_argument(
        "--tokenizer", metavar="MODEL",
        help="folder or name of the model whose tokenizer sizes the prompts (default: the served model's, if it lies "
        "on this machine, else the server is asked)",
    )  # fmt: skip
    add_number(group, "--temperature", "0 is greedy (default: 0)", kind=float, least=0)


def _add_ranks_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mpi", action="store_true", help="be one of the ranks that mpiexec started (pip install 'eventlm[mpi]')"
    )
    add_number(
        group, "--post-kernel", "rounds of a kernel that runs behind each answer, on this host's GPU", least=1,
        metavar="N",
    )  # fmt: skip


def _add_result_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slo", default="", metavar="LIMITS", help="ttft=MS,tpot=MS,e2e=MS, for the goodput")
    group.add_argument("--json", action="store_true", help="print one JSON object, the same as in summary.json")
    group.add_argument(
        "--output", default="", metavar="DIR", help="write requests.jsonl, summary.json and plot.png into a new folder"
    )
    group.add_argument(
        "--ceiling", action=argparse.BooleanOptionalAction, default=True, dest="measures_ceiling",
        help="measure first, for a second, what this client can consume (default: yes)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the load test and print its report; returns the exit code.

    Of several ranks the first one reports, and its exit code is that of the run.
    """
    import uvloop

    from eventlm.bench.launcher import num_launched
    from eventlm.bench.mpi_ranks import world
    from eventlm.bench.ranks import Ranks

    ranks = Ranks()
    folder = Path(arguments.output).expanduser() if arguments.output else None
    try:
        if arguments.mpi:
            ranks = world()
        elif num_launched() > 1:
            raise UsageError(f"{num_launched()} ranks were started, each with a load of its own: add --mpi")
        result, code = uvloop.run(ranks.sharing_errors(_bench(arguments, folder, ranks)))
    except EventLMError:
        ranks.leave()
        if ranks.rank:
            return ExitCode.OK
        raise
    except KeyboardInterrupt:
        # The load itself has handlers of its own.
        if not ranks.rank:
            print(_NOTHING_SENT, file=sys.stderr, flush=True)
        ranks.quit(ExitCode.INTERRUPTED)
        raise
    except Exception:
        ranks.abort()
        raise
    ranks.leave()
    return ExitCode.OK if ranks.rank else _report(result, code, folder, as_json=arguments.json)


async def _bench(arguments: argparse.Namespace, folder: Path | None, ranks: Ranks) -> tuple[ServeResult, int]:
    """The result, and the exit code of a signal (0: none)."""
    from eventlm.bench.report import check_output
    from eventlm.bench.serve_bench import ServeBench
    from eventlm.client.openai_client import OpenAIClient

    options = serve_options(arguments, num_ranks=ranks.size)
    if folder is not None and ranks.rank == 0:
        check_output(folder)
    await _check_equal(options, ranks)
    async with OpenAIClient(options.url, api_key=options.api_key, timeout_seconds=options.timeout_s) as client:
        bench = ServeBench(options, client, ranks)
        await bench.prepare(_say)
        with StopSignals() as signals, _progress(bench.num_requests) as on_end:
            result = await bench.run(signals.stop, on_end)
        if not result.load.interrupted:
            return result, 0
        # Another rank may have received the signal.
        return result, signals.exit_code if signals.received else ExitCode.INTERRUPTED


async def _check_equal(options: ServeOptions, ranks: Ranks) -> None:
    """Raise UsageError if the options of the ranks are not equal, up to the API key."""
    from msgspec import structs

    from eventlm.bench.serve_bench import ServeOptions

    own = structs.replace(options, api_key="")

    async def shown() -> ServeOptions:
        return own

    for rank, others in enumerate(await ranks.gathered(shown(), ServeOptions)):
        differing = [name for name in own.__struct_fields__ if getattr(others, name) != getattr(own, name)]
        if differing:
            raise UsageError(f"rank {rank} has other flags than rank {ranks.rank}: {', '.join(differing)}")


def _report(result: ServeResult, code: int, folder: Path | None, *, as_json: bool) -> int:
    """Print and write the report; returns the exit code, which is `code` where that is not 0."""
    from eventlm.bench.report import as_object, format_report, warnings, write_output
    from eventlm.bench.statistics import summarize

    if not result.load.records:
        if code:
            print(_NOTHING_SENT, file=sys.stderr)
            return code
        raise EventLMError("nothing was sent: no arrival lies within --duration")
    statistics = summarize(result.load, result.options.objectives)
    summary = as_object(result, statistics) if as_json else None
    print_report([format_report(result, statistics)], summary, warnings=warnings(result, statistics))
    if folder is not None:
        write_output(folder, result, statistics)
        print(f"eventlm: wrote {folder}/requests.jsonl, summary.json and plot.png", file=sys.stderr)
    has_failed = not statistics.num_success or bool(result.load.server_gone)
    return code or (ExitCode.FAILED if has_failed else ExitCode.OK)


def _say(phase: str) -> None:
    if sys.stderr.isatty():
        print(f"eventlm: {phase}", file=sys.stderr)


@contextlib.contextmanager
def _progress(num_requests: int | None) -> Iterator[Callable[[RequestRecord], None]]:
    """A bar of the requests that have ended, on a terminal."""
    from tqdm import tqdm

    num_failed = 0
    with tqdm(
        total=num_requests, unit=" requests", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False
    ) as bar:

        def on_end(record: RequestRecord) -> None:
            nonlocal num_failed
            if not record.is_success:
                num_failed += 1
                bar.set_postfix(failed=num_failed)
            bar.update()

        yield on_end


def serve_options(arguments: argparse.Namespace, *, num_ranks: int = 1) -> ServeOptions:
    """The options from the flags. Raises UsageError for contradictory ones."""
    from eventlm.bench.draws import parse_lengths
    from eventlm.bench.serve_bench import ServeOptions
    from eventlm.config.objectives import parse_objectives

    _check_combinations(arguments)
    names = ServeOptions.__struct_fields__
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    if arguments.arrivals is None and arguments.burstiness is not None:
        given["arrivals"] = "gamma"
    if arguments.inflight is not None:
        given["max_concurrency"] = arguments.inflight * num_ranks
    given["api_key"] = arguments.api_key or os.environ.get(API_KEY_VARIABLE, "")
    return ServeOptions(
        **given,
        input_lengths=parse_lengths(arguments.input_len or DEFAULT_INPUT_LENGTH, "--input-len"),
        output_lengths=parse_lengths(arguments.output_len, "--output-len"),
        objectives=parse_objectives(arguments.slo) if arguments.slo else None,
    )


def _check_combinations(arguments: argparse.Namespace) -> None:
    """Raise UsageError for flags that would be ignored."""
    if arguments.inflight is not None and arguments.max_concurrency is not None:
        raise UsageError("--inflight is for each rank and --max-concurrency for all together: leave one out")
    if arguments.retry_backoff_ms is not None and not arguments.retries:
        raise UsageError("--retry-backoff-ms is for --retries, of which there are none")
    if arguments.burstiness is not None and arguments.arrivals not in (None, "gamma"):
        raise UsageError(f"--burstiness is for --arrivals gamma, not {arguments.arrivals}")
    if (arguments.arrivals or arguments.burstiness is not None) and math.isinf(arguments.request_rate):
        raise UsageError("--arrivals and --burstiness need a --request-rate")
    if arguments.trace and not math.isinf(arguments.request_rate):
        raise UsageError("--trace brings its own times: leave --request-rate out")
    if arguments.dataset and arguments.trace:
        raise UsageError("--trace brings the lengths of its prompts: leave --dataset out")
    if arguments.input_len is not None and (arguments.trace or arguments.dataset):
        raise UsageError("--input-len is for synthetic prompts: leave it out, or --trace and --dataset")
    if arguments.prefix_tokens is not None and arguments.dataset:
        raise UsageError("--prefix-len is for synthetic prompts: leave it out, or --dataset")
    if arguments.num_prefixes is not None and arguments.prefix_tokens is None:
        raise UsageError("--num-prefixes needs a --prefix-len")
    if arguments.shuffle and not arguments.dataset:
        raise UsageError("--shuffle is for a --dataset")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('it is not a JSON object such as {"priority": 1}')
    return value
