"""`eventlm trace import`: public traces of real load become workload files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eventlm.cli.output import file_progress, print_report
from eventlm.cli.parser import Parser
from eventlm.cli.time_window import nanoseconds
from eventlm.errors import UsageError
from eventlm.formatting import counted, tally
from eventlm.table import aligned
from eventlm.types import NANOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from eventlm.metrics.trace_metrics import Distribution
    from eventlm.replay.workload.importer import ImportSummary

SOURCES = ("azure", "burstgpt", "mooncake", "bailian", "vidur")


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = "Turn a public trace of real load into a workload file, which `eventlm simulate` reads."
    parser.epilog = """\
examples:
  eventlm trace import --from azure AzureLLMInferenceTrace_conv.csv -o A.jsonl
  eventlm trace import --from mooncake conversation_trace.jsonl -o M.jsonl
  eventlm trace import --from burstgpt BurstGPT_1.csv.gz -o B.jsonl \\
                       --start 24h --duration 1h
  eventlm simulate A.jsonl --cost-model h200-llama3-8b

  --from    columns
  azure     TIMESTAMP,ContextTokens,GeneratedTokens
  burstgpt  Timestamp,Request tokens,Response tokens, and if there
            Session ID,Elapsed time,Log Type
  mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids
            (blocks of 512 tokens)
  bailian   JSON lines: chat_id, parent_chat_id, timestamp (s), input_length,
            output_length, hash_ids (blocks of 16 tokens), type
  vidur     arrived_at,num_prefill_tokens,num_decode_tokens

The first request arrives at 0. Requests without output failed, and are left out.
Blocks stay in the trace's own size, also the partial one at a prompt's end.
When the workload is simulated they are cut into blocks of the engine's size,
the partial one into as many as its tokens fill."""
    parser.add_argument("file", metavar="FILE", help="the trace, or its gzip; -: standard input")
    parser.add_argument("--from", dest="source", choices=SOURCES, required=True, help="whose trace it is")
    parser.add_argument("-o", "--output", metavar="W.jsonl", required=True, help="the workload file to write")
    parser.add_argument(
        "--start", metavar="TIME", help="leave out what comes before, counted from the trace's first line, such as 2h"
    )
    parser.add_argument("--duration", metavar="TIME", help="keep only this much from --start on")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a summary of the workload."""
    from eventlm.replay.workload.importer import import_trace

    if arguments.output == "-":
        raise UsageError("-o -: a workload is written to a file, give its name")
    path = "/dev/stdin" if arguments.file == "-" else arguments.file
    with file_progress("reading", path) as on_progress:
        found = import_trace(
            path,
            arguments.output,
            source=arguments.source,
            start_ns=nanoseconds(arguments.start, flag="--start") if arguments.start is not None else 0,
            duration_ns=nanoseconds(arguments.duration, flag="--duration") if arguments.duration is not None else None,
            on_progress=on_progress,
        )
    print_report(aligned(_rows(found)), found if arguments.json else None)
    return 0


def _rows(found: ImportSummary) -> Iterator[tuple[str, str]]:
    seconds = found.span_ns / NANOSECONDS_PER_SECOND
    rate = f", {found.num_requests / seconds:,.2f} a second" if seconds else ""
    yield "workload", f"{found.output}, {counted(found.num_bytes, 'byte')}"
    yield "requests", f"{found.num_requests:,} in {seconds:,.3f} s{rate}"
    if found.left_out:
        yield "left out", tally(found.left_out)
    if found.num_sorted:
        yield "order", f"{counted(found.num_sorted, 'row')} came after a later one; sorted by time"
    yield "prompts", _lengths(found.prompt_tokens)
    yield "outputs", _lengths(found.output_tokens)
    if found.block_size:
        yield (
            "blocks",
            f"{found.num_blocks:,} of {found.block_size} tokens, {found.num_distinct_blocks:,} distinct; the last of a "
            "prompt may be partial",
        )
    if found.sessions_from:
        yield "sessions", f"{found.num_sessions:,} with {counted(found.num_turns, 'later turn')}, {found.sessions_from}"


def _lengths(found: Distribution) -> str:
    return f"mean {found.mean:,.0f}, p50 {found.p50:,}, p99 {found.p99:,}, max {found.max:,} tokens"
