"""`eventlm bench serve | throughput | latency | step`: how fast a server, or the engine by itself, is."""

from __future__ import annotations

from eventlm.cli.bench import engine as bench_engine
from eventlm.cli.bench import serve as bench_serve
from eventlm.cli.bench import step as bench_step
from eventlm.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the command's subcommands."""
    parser.description = (
        "Measure a server that speaks OpenAI's API (serve), or the engine by itself: tokens per second of a\n"
        "workload that is submitted at once (throughput), the time of one batch (latency), where the time of a step\n"
        "goes and the least that it could take (step)."
    )
    parser.epilog = """\
examples:
  eventlm bench serve --request-rate 4 --num-prompts 200 --slo ttft=500,tpot=50
  eventlm bench serve --max-concurrency 16 --duration 60 --output results
  eventlm bench throughput --num-prompts 64 --input-len 128 --output-len 64
  eventlm bench latency --batch-size 8
  eventlm bench step --batch 1,8 --context 128"""
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    bench_serve.configure(kinds.add_parser("serve", help="latencies and rates of a server under load"))
    bench_engine.configure_throughput(
        kinds.add_parser("throughput", help="tokens per second of the engine, all requests at once")
    )
    bench_engine.configure_latency(kinds.add_parser("latency", help="the time of one batch in the engine"))
    bench_step.configure(kinds.add_parser("step", help="where the time of a step goes, next to its floor"))
