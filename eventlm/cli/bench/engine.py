"""`eventlm bench throughput` and `eventlm bench latency`: their flags, the engine's start and end, their reports."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from eventlm.cli.config_flags import add_config_flags, config_from_arguments, print_config
from eventlm.cli.engine_command import compose_and_warn, run_in_loop, start_engine
from eventlm.cli.parser import Parser
from eventlm.config import Config
from eventlm.errors import UsageError
from eventlm.formatting import counted

if TYPE_CHECKING:
    from eventlm.bench.engine_bench import BatchResult
    from eventlm.bench.lengths import Lengths
    from eventlm.bootstrap.composition import Composition

#: Takes the arguments, the lengths of prompts and outputs, a started engine, and an event that ends the measurement.
#: Returns the report as text and as an object for --json.
Measure = Callable[
    [argparse.Namespace, "tuple[Lengths, Lengths]", "Composition", asyncio.Event],
    Awaitable[tuple[str, dict[str, Any]]],
]

_LENGTH_HELP = "N, uniform:min=N,max=N, normal:mean=X,std=X or lognormal:median=X,sigma=X"


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
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests (default: 100)")
    group.add_argument(
        "--input-len", default="256", metavar="LENGTH", help=f"prompt tokens: {_LENGTH_HELP} (default: 256)"
    )
    group.add_argument("--output-len", default="128", metavar="LENGTH", help="output tokens, likewise (default: 128)")
    group.add_argument(
        "--prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts share, on top of --input-len"
    )
    _add_common_flags(parser, group)
    parser.set_defaults(run=run_throughput)


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
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="requests in a batch (default: 8)")
    group.add_argument("--input-len", default="32", metavar="N", help="prompt tokens of each (default: 32)")
    group.add_argument("--output-len", default="128", metavar="N", help="output tokens of each (default: 128)")
    group.add_argument(
        "--num-iters-warmup", type=int, default=2, metavar="N", help="batches before the measured ones (default: 2)"
    )
    group.add_argument("--num-iters", type=int, default=10, metavar="N", help="measured batches (default: 10)")
    _add_common_flags(parser, group)
    parser.set_defaults(run=run_latency)


def _add_common_flags(parser: Parser, group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the prompts follow from it")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(parser, without=("server",))


def run_throughput(arguments: argparse.Namespace) -> int:
    """Measure the throughput; returns the exit code."""
    return _run(arguments, _throughput)


def run_latency(arguments: argparse.Namespace) -> int:
    """Measure the latency; returns the exit code."""
    return _run(arguments, _latency)


def _run(arguments: argparse.Namespace, measure: Measure) -> int:
    config = config_from_arguments(arguments)
    if arguments.print_config:
        return print_config(config)
    lengths = _lengths(arguments)
    return run_in_loop(config, _measure(config, arguments, lengths, measure))


def _lengths(arguments: argparse.Namespace) -> tuple[Lengths, Lengths]:
    """The lengths of prompts and outputs. Raises UsageError for whatever is wrong with the command's own flags."""
    from eventlm.bench.lengths import parse_lengths

    least = {"num_prompts": 1, "batch_size": 1, "num_iters": 1, "num_iters_warmup": 0, "prefix_len": 0, "seed": 0}
    for name, minimum in least.items():
        value = getattr(arguments, name, minimum)
        if value < minimum:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not at least {minimum}")
    return parse_lengths(arguments.input_len, "--input-len"), parse_lengths(arguments.output_len, "--output-len")


async def _measure(
    config: Config, arguments: argparse.Namespace, lengths: tuple[Lengths, Lengths], measure: Measure
) -> int:
    from eventlm.cli.serve.stop_signals import StopSignals

    composed = compose_and_warn(config)
    with StopSignals() as signals:
        try:
            if not await _started(composed, signals.stop):
                return signals.exit_code
            text, result = await measure(arguments, lengths, composed, signals.stop)
        finally:
            await composed.engine.stop()
        print(json.dumps(result) if arguments.json else text)
        return signals.exit_code if signals.stop.is_set() else 0


async def _started(composed: Composition, stop: asyncio.Event) -> bool:
    """Start the engine; False if `stop` comes first."""
    start = asyncio.ensure_future(start_engine(composed.engine))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
    is_started = start.done()
    start.cancel()
    stopped.cancel()
    await asyncio.gather(start, stopped, return_exceptions=True)
    if is_started:
        start.result()
    return is_started


async def _throughput(
    arguments: argparse.Namespace, lengths: tuple[Lengths, Lengths], composed: Composition, stop: asyncio.Event
) -> tuple[str, dict[str, Any]]:
    from tqdm import tqdm

    from eventlm.bench.engine_bench import RequestFactory, run_batch

    factory = RequestFactory(composed, seed=arguments.seed)
    if arguments.prefix_len:
        factory.share_prefix(arguments.prefix_len)
    group = factory.make(arguments.num_prompts, *lengths)
    with tqdm(total=len(group), unit=" requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        result = await run_batch(composed.engine, group, stop, on_finish=lambda num_tokens: bar.update() and None)
    return _throughput_text(composed, result), _throughput_json(arguments, composed, result)


def _throughput_text(composed: Composition, result: BatchResult) -> str:
    seconds = result.duration_ns / 1e9
    total = result.prompt_tokens + result.output_tokens
    cut = ", interrupted" if result.is_interrupted else ""
    return (
        f"model            {composed.engine.model_names[0]}\n"
        f"requests         {counted(result.num_finished, 'request')} in {seconds:.2f} s{cut}\n"
        f"tokens           {result.prompt_tokens:,} prompt, {result.output_tokens:,} output\n"
        f"requests/s       {result.num_finished / seconds:.2f}\n"
        f"output tokens/s  {result.output_tokens / seconds:,.1f}\n"
        f"total tokens/s   {total / seconds:,.1f}"
    )


def _throughput_json(arguments: argparse.Namespace, composed: Composition, result: BatchResult) -> dict[str, Any]:
    seconds = result.duration_ns / 1e9
    return {
        "model": composed.engine.model_names[0],
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "num_requests": result.num_finished,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "elapsed_s": seconds,
        "requests_per_second": result.num_finished / seconds,
        "output_tokens_per_second": result.output_tokens / seconds,
        "total_tokens_per_second": (result.prompt_tokens + result.output_tokens) / seconds,
        "interrupted": result.is_interrupted,
    }


async def _latency(
    arguments: argparse.Namespace, lengths: tuple[Lengths, Lengths], composed: Composition, stop: asyncio.Event
) -> tuple[str, dict[str, Any]]:
    from tqdm import tqdm

    from eventlm.bench.engine_bench import RequestFactory, run_batch

    factory = RequestFactory(composed, seed=arguments.seed)
    seconds: list[float] = []
    num_batches = arguments.num_iters_warmup + arguments.num_iters
    for place in tqdm(range(num_batches), unit=" batches", disable=not sys.stderr.isatty(), leave=False):
        group = factory.make(arguments.batch_size, *lengths)
        result = await run_batch(composed.engine, group, stop)
        if result.is_interrupted:
            break
        if place >= arguments.num_iters_warmup:
            seconds.append(result.duration_ns / 1e9)
    return _latency_text(arguments, composed, seconds), _latency_json(arguments, composed, seconds)


def _latency_text(arguments: argparse.Namespace, composed: Composition, seconds: list[float]) -> str:
    from eventlm.bench.statistics import distribution

    found = distribution(seconds)
    size = (
        f"batch    {counted(arguments.batch_size, 'request')} of {arguments.input_len} prompt and "
        f"{arguments.output_len} output tokens"
    )
    lines = [f"model    {composed.engine.model_names[0]}", size, f"batches  {len(seconds)} measured"]
    if found is not None:
        for name in ("mean", "p50", "p90", "p95", "p99", "max"):
            lines.append(f"{name:<8} {getattr(found, name):.4f} s")
    return "\n".join(lines)


def _latency_json(arguments: argparse.Namespace, composed: Composition, seconds: list[float]) -> dict[str, Any]:
    import msgspec

    from eventlm.bench.statistics import distribution

    return {
        "model": composed.engine.model_names[0],
        "batch_size": arguments.batch_size,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "latency_s": msgspec.to_builtins(distribution(seconds)),
        "latencies_s": seconds,
    }
