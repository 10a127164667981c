"""`eventlm bench throughput` and `eventlm bench latency`: their flags, the engine's start and end, their reports."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from eventlm.cli.config_flags import add_config_flags, with_config
from eventlm.cli.engine_command import StopSignals, compose_and_warn, run_in_loop, start_engine
from eventlm.cli.output import print_report
from eventlm.cli.parser import Parser, add_number
from eventlm.config import Config
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.table import aligned
from eventlm.tasks import completed

if TYPE_CHECKING:
    from eventlm.bench.draws import Lengths
    from eventlm.bootstrap.composition import Composition

#: The lines of a report, and the object that --json prints.
Report = tuple[list[tuple[str, str]], dict[str, Any]]
#: Takes the arguments, the lengths of prompts and outputs, a started engine, and an event that ends the measurement.
Measure = Callable[[argparse.Namespace, "tuple[Lengths, Lengths]", "Composition", asyncio.Event], Awaitable[Report]]

LENGTH_HELP = "N, uniform:min=N,max=N, normal:mean=X,std=X or lognormal:median=X,sigma=X"


def configure_throughput(parser: Parser) -> None:
    """Add the flags of `throughput`."""
    parser.description = """\
Submit a workload of random prompts to the engine at once, without a server, and report requests and tokens per
second. Time counts from the submission to the last token; the start of the engine is left out. Every request
goes on to its output length."""
    parser.usage = "eventlm bench throughput [--model MODEL] [--num-prompts N] [flags]"
    parser.epilog = """\
examples:
  eventlm bench throughput --num-prompts 64 --input-len 128 --output-len 64
  eventlm bench throughput --input-len lognormal:median=200,sigma=0.6 \\
    --output-len uniform:min=16,max=128
  eventlm bench throughput --model fake --num-prompts 500 --replicas 2"""
    group = parser.add_argument_group("workload")
    add_number(group, "--num-prompts", "requests (default: 100)", least=1, default=100)
    group.add_argument(
        "--input-len", default="256", metavar="LENGTH", help=f"prompt tokens: {LENGTH_HELP} (default: 256)"
    )
    group.add_argument("--output-len", default="128", metavar="LENGTH", help="output tokens, likewise (default: 128)")
    add_number(group, "--prefix-len", "tokens that all prompts share, on top of --input-len", least=0, default=0)
    _add_common_flags(parser, group)
    parser.set_defaults(run=with_config(partial(_run, measure=_throughput)))


def configure_latency(parser: Parser) -> None:
    """Add the flags of `latency`."""
    parser.description = """\
Run one batch of random prompts through the engine, without a server, over and over, and report the time of a
batch from its submission to its last token. Prompts are new in each iteration, so that no prefix is cached."""
    parser.usage = "eventlm bench latency [--model MODEL] [--batch-size N] [flags]"
    parser.epilog = """\
examples:
  eventlm bench latency --batch-size 8 --input-len 32 --output-len 128
  eventlm bench latency --batch-size 1 --output-len 1   the time to first token"""
    group = parser.add_argument_group("workload")
    add_number(group, "--batch-size", "requests in a batch (default: 8)", least=1, default=8)
    group.add_argument("--input-len", default="32", metavar="N", help="prompt tokens of each (default: 32)")
    group.add_argument("--output-len", default="128", metavar="N", help="output tokens of each (default: 128)")
    add_number(group, "--num-iters-warmup", "batches before the measured ones (default: 2)", least=0, default=2)
    add_number(group, "--num-iters", "measured batches (default: 10)", least=1, default=10)
    _add_common_flags(parser, group)
    parser.set_defaults(run=with_config(partial(_run, measure=_latency)))


def _add_common_flags(parser: Parser, group: argparse._ArgumentGroup) -> None:
    add_number(group, "--seed", "the prompts follow from it", least=0, default=0)
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(parser, without=("server", "gateway"))


def _run(config: Config, arguments: argparse.Namespace, measure: Measure) -> int:
    from eventlm.bench.draws import parse_lengths

    lengths = parse_lengths(arguments.input_len, "--input-len"), parse_lengths(arguments.output_len, "--output-len")
    return run_in_loop(config, _measure(config, arguments, lengths, measure))


async def _measure(
    config: Config, arguments: argparse.Namespace, lengths: tuple[Lengths, Lengths], measure: Measure
) -> int:
    from eventlm.engine.request import ContextLengthError

    composed = compose_and_warn(config)
    with StopSignals() as signals:
        try:
            if not await completed(start_engine(composed.engine), signals.stop):
                return signals.exit_code
            rows, result = await measure(arguments, lengths, composed, signals.stop)
        except ContextLengthError as error:
            raise UsageError(str(error)) from error
        finally:
            await composed.engine.stop()
        model = composed.engine.model_names[0]
        workload = {"model": model, "input_len": arguments.input_len, "output_len": arguments.output_len}
        print_report(aligned([("model", model), *rows]), workload | result if arguments.json else None)
        return signals.exit_code if signals.stop.is_set() else 0


async def _throughput(
    arguments: argparse.Namespace, lengths: tuple[Lengths, Lengths], composed: Composition, stop: asyncio.Event
) -> Report:
    from tqdm import tqdm

    from eventlm.bench.engine_bench import RequestFactory, run_batch

    factory = RequestFactory(composed, seed=arguments.seed, prefix_tokens=arguments.prefix_len)
    group = factory.make(arguments.num_prompts, *lengths)
    with tqdm(total=len(group), unit=" requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        found = await run_batch(composed.engine, group, stop, on_finish=bar.update)
    seconds = found.duration_ns / 1e9
    result = {
        "num_requests": found.num_finished,
        "prompt_tokens": found.prompt_tokens,
        "output_tokens": found.output_tokens,
        "elapsed_s": seconds,
        "requests_per_second": found.num_finished / seconds,
        "output_tokens_per_second": found.output_tokens / seconds,
        "total_tokens_per_second": (found.prompt_tokens + found.output_tokens) / seconds,
        "interrupted": found.is_interrupted,
    }
    cut = ", interrupted" if found.is_interrupted else ""
    rows = [
        ("requests", f"{counted(found.num_finished, 'request')} in {seconds:.2f} s{cut}"),
        ("tokens", f"{found.prompt_tokens:,} prompt, {found.output_tokens:,} output"),
        ("requests/s", f"{result['requests_per_second']:.2f}"),
        ("output tokens/s", f"{result['output_tokens_per_second']:,.1f}"),
        ("total tokens/s", f"{result['total_tokens_per_second']:,.1f}"),
    ]
    return rows, result


async def _latency(
    arguments: argparse.Namespace, lengths: tuple[Lengths, Lengths], composed: Composition, stop: asyncio.Event
) -> Report:
    import msgspec
    from tqdm import tqdm

    from eventlm.bench.engine_bench import RequestFactory, run_batch
    from eventlm.bench.statistics import distribution

    factory = RequestFactory(composed, seed=arguments.seed)
    latencies_s: list[float] = []
    num_batches = arguments.num_iters_warmup + arguments.num_iters
    for index in tqdm(range(num_batches), unit=" batches", disable=not sys.stderr.isatty(), leave=False):
        batch = await run_batch(composed.engine, factory.make(arguments.batch_size, *lengths), stop)
        if batch.is_interrupted:
            break
        if index >= arguments.num_iters_warmup:
            latencies_s.append(batch.duration_ns / 1e9)
    latency_s = msgspec.to_builtins(distribution(latencies_s))
    of_each = f"of {arguments.input_len} prompt and {arguments.output_len} output tokens"
    rows = [
        ("batch", f"{counted(arguments.batch_size, 'request')} {of_each}"),
        ("batches", f"{len(latencies_s)} measured"),
        *((name, f"{value:.4f} s") for name, value in (latency_s or {}).items()),
    ]
    return rows, {"batch_size": arguments.batch_size, "latency_s": latency_s, "latencies_s": latencies_s}
