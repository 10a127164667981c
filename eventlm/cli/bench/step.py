"""`eventlm bench step`: its flags, the engine's start and end, its report."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eventlm.cli.config_flags import add_config_flags, config_from_arguments, print_config
from eventlm.cli.engine_command import print_warnings, run_in_loop, start_engine
from eventlm.cli.parser import Parser
from eventlm.config import Config
from eventlm.config.structs import AUTO
from eventlm.errors import UsageError

if TYPE_CHECKING:
    from eventlm.bench.step.machine_probe import Machine
    from eventlm.bench.step.measure import StepCase
    from eventlm.bench.step.report import CaseTimes
    from eventlm.engine.inference_engine import InferenceEngine


class _Measured(NamedTuple):
    """What is reported."""

    machine: Machine
    times: list[CaseTimes]


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = """\
Print where the time of a step goes, part by part, next to the least that it could take: an engine with its worker
process runs sequences of random tokens as a server does, recorder included, HTTP left out.

floor ms is the longer of a part's bytes (weights, keys and values, as they are held) at the bandwidth of this machine
and of its FLOPs at the peak of a product of matrices, both measured in the same run. For a whole step it is the longer
of all its bytes and all its FLOPs. x floor says how many times that was needed. With --quantization int8 the products
with weights count at twice the peak of floats, which is what processors have over bfloat16. x floor may be below 1
where all weights of a part fit the processor's last-level cache, which is faster than its memory, and where others who
share the machine slowed its memory while that was measured.

  lm_head         the output matrix, and the draw of tokens whose logits
                  nothing else needs
  sampling        what remains of drawing the tokens
  preparation     what the worker does around the model: block tables,
                  token ids, ends
  transport       from the end of a step to the start of the next, which
                  the engine had already decided on
  engine          the same, where the worker had to wait for that decision
  engine's share  all four, of the step
  engine's CPU    processor time of the engine's process for each step; it
                  runs ahead, while the worker computes"""
    parser.usage = "eventlm bench step [--batch N,...] [--context N,...] [flags]"
    parser.epilog = """\
examples:
  eventlm bench step
  eventlm bench step --batch 1,8,32 --context 128,512 --prefill 512
  eventlm bench step --batch 32 --context 128 --prefill 0 --cpu-kernels torch
  eventlm bench step --model FOLDER --batch 1 --json > step.json"""
    group = parser.add_argument_group("steps")
    group.add_argument(
        "--batch", default="1,8,32", metavar="N,...", help="sequences that decode together (default: 1,8,32)"
    )
    group.add_argument(
        "--context", default="128,512", metavar="N,...", help="tokens that each of them holds (default: 128,512)"
    )
    group.add_argument(
        "--prefill", default="512", metavar="N,...", help="tokens of a prompt; 0: measure none (default: 512)"
    )
    group.add_argument("--steps", type=int, default=32, metavar="N", help="measured steps of a case (default: 32)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(parser, without=("server",))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure all cases and print them; returns the exit code."""
    config = config_from_arguments(arguments)
    if arguments.print_config:
        return print_config(config)
    cases = _cases(arguments)
    if config.scheduler.replicas != 1:
        raise UsageError(f"--replicas {config.scheduler.replicas}: the steps of one replica are measured")
    with tempfile.TemporaryDirectory(prefix="eventlm-bench-") as folder:
        return run_in_loop(config, _bench(_profiled(config, folder), arguments, cases))


def _profiled(config: Config, folder: str) -> Config:
    """Time the worker's operations, and record as a server does unless the flags choose otherwise."""
    from msgspec import structs

    record = folder if config.record.record == AUTO else config.record.record
    return structs.replace(
        config,
        worker=structs.replace(config.worker, profile_ops=True),
        record=structs.replace(config.record, record=record),
    )


def _cases(arguments: argparse.Namespace) -> list[StepCase]:
    """Raises UsageError for whatever is wrong with the command's own flags."""
    from eventlm.bench.step.measure import StepCase

    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps} is not at least 1")
    if not 0 <= arguments.temperature < math.inf:
        raise UsageError(f"--temperature {arguments.temperature:g} is not a number from 0 upwards")
    batches, contexts = _numbers("--batch", arguments.batch), _numbers("--context", arguments.context)
    prefills = [] if arguments.prefill == "0" else _numbers("--prefill", arguments.prefill)
    return [StepCase(batch, context) for context in contexts for batch in batches] + [
        StepCase(0, length) for length in prefills
    ]


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{flag} {text}: give numbers with commas between them, such as 1,8,32") from error
    if min(numbers) < 1:
        raise UsageError(f"{flag} {text}: {min(numbers)} is not at least 1")
    return numbers


async def _bench(config: Config, arguments: argparse.Namespace, cases: list[StepCase]) -> int:
    import msgspec

    from eventlm.bench.step.measure import check_cases
    from eventlm.bench.step.report import as_json, step_lines
    from eventlm.bootstrap.composition import compose_engine
    from eventlm.cli.serve.stop_signals import StopSignals

    engine, warnings = compose_engine(config)
    print_warnings(warnings)
    check_cases(engine, cases, arguments.steps)
    with StopSignals() as signals:
        measuring = asyncio.ensure_future(_measured(engine, arguments, cases))
        stopped = asyncio.ensure_future(signals.stop.wait())
        await asyncio.wait({measuring, stopped}, return_when=asyncio.FIRST_COMPLETED)
        is_stopped = not measuring.done()
        measuring.cancel()
        stopped.cancel()
        await asyncio.gather(measuring, stopped, return_exceptions=True)
        await engine.stop()
        if is_stopped:
            return signals.exit_code
    report = (engine.model_names[0], engine.worker_host.get("attention_backend", ""), *measuring.result())
    print(msgspec.json.encode(as_json(*report)).decode() if arguments.json else "\n".join(step_lines(*report)))
    return 0


async def _measured(engine: InferenceEngine, arguments: argparse.Namespace, cases: list[StepCase]) -> _Measured:
    from tqdm import tqdm

    from eventlm.bench.step.machine_probe import probe
    from eventlm.bench.step.measure import StepBench, check_cases
    from eventlm.bench.step.report import ModelFigures, case_times
    from eventlm.engine.setup import worker_setups
    from eventlm.models.config import read_config

    # Before the worker has its threads.
    machine = await probe(worker_setups(engine.setup)[0].threads)
    await start_engine(engine)
    # Once more: now it is known how many KV blocks there are.
    check_cases(engine, cases, arguments.steps)
    host = engine.worker_host
    model = None
    if "weight_bytes" in host:
        model = ModelFigures(
            config=read_config(Path(engine.setup.model)),
            weight_bytes=host["weight_bytes"],
            kv_token_bytes=host["kv_token_bytes"],
            is_int8=engine.setup.config.model.quantization == "int8",
        )
    bench = StepBench(engine, num_steps=arguments.steps, temperature=arguments.temperature)
    times = [
        case_times(await bench.measure(case), machine, model)
        for case in tqdm(cases, unit=" cases", disable=not sys.stderr.isatty(), leave=False)
    ]
    return _Measured(machine, times)
