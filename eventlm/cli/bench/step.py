"""`eventlm bench step`: its flags, the engine's start and end, its report."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from eventlm.cli.config_flags import add_config_flags, with_config
from eventlm.cli.engine_command import StopSignals, run_in_loop, start_engine
from eventlm.cli.output import print_report, warn
from eventlm.cli.parser import Parser, add_number
from eventlm.config import Config
from eventlm.config.structs import AUTO
from eventlm.errors import UsageError
from eventlm.tasks import completed

if TYPE_CHECKING:
    from eventlm.bench.step.machine_probe import Machine
    from eventlm.bench.step.measure import StepCase
    from eventlm.bench.step.report import CaseTimes
    from eventlm.engine.inference_engine import InferenceEngine


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = """\
Print where the time of a step goes, part by part, next to the least that it could take: an engine with its worker
process runs sequences of random tokens as a server does, recorder included, HTTP left out.

floor ms is the longer of a part's bytes (weights, keys and values, as they are held) at the bandwidth of this machine
and of its FLOPs at the peak of a product of matrices, both measured in the same run. For a whole step it is the longer
of all its bytes and all its FLOPs. x floor is the time as a multiple of it. Products of integers (--quantization, and
files of codes other than FP8) count at twice the peak of floats, as processors do twice as many of them as of bfloat16;
with AMX this is not reached with codes, which are multiplied as bfloat16 from some 32 tokens on.
x floor may be below 1 if all weights of a part fit the processor's last-level cache, which is faster than its memory,
or if other programs slowed the memory while it was measured. A model on several ranks has no floors: its parts are
those of the rank that answers. In a pipeline this is one of the last stage; every step decodes --batch sequences, and
lasts from the end of the step before it to its own.

  waiting for peers
                  what a rank waits for others, in a pipeline also for the
                  stage before
  exchange        in a pipeline, the way of a step from that stage to the
                  last one
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
    add_number(group, "--steps", "measured steps of a case (default: 32)", least=1, default=32)
    add_number(group, "--temperature", "0 is greedy (default: 0)", kind=float, least=0, default=0.0)
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(parser, without=("server", "gateway"))
    parser.set_defaults(run=with_config(run))


def run(config: Config, arguments: argparse.Namespace) -> int:
    """Measure all cases and print them; returns the exit code."""
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
    """The cases that the flags ask for. Raises UsageError."""
    from eventlm.bench.step.measure import StepCase

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
    from eventlm.bench.step.measure import check_cases
    from eventlm.bench.step.report import as_json, step_lines
    from eventlm.bootstrap.composition import compose_engine

    engine, warnings = compose_engine(config)
    warn(warnings)
    check_cases(engine, cases, arguments.steps)
    with StopSignals() as signals:
        try:
            measuring = await completed(_measured(engine, arguments, cases), signals.stop)
        finally:
            await engine.stop()
    if measuring is None:
        return signals.exit_code
    report = (engine.model_names[0], engine.worker_host.get("attention_backend", ""), *measuring.result())
    print_report(step_lines(*report), as_json(*report) if arguments.json else None)
    return 0


async def _measured(
    engine: InferenceEngine, arguments: argparse.Namespace, cases: list[StepCase]
) -> tuple[Machine, list[CaseTimes]]:
    from tqdm import tqdm

    from eventlm.bench.step.floor import ModelFigures, integer_matrices, num_matrix_weights
    from eventlm.bench.step.machine_probe import probe
    from eventlm.bench.step.measure import StepBench, check_cases
    from eventlm.bench.step.report import case_times
    from eventlm.engine.setup import worker_setups
    from eventlm.models.config import read_model
    from eventlm.models.weights.find_weights import find_weights
    from eventlm.models.weights.matrix_types import matrix_types

    has_bar = sys.stderr.isatty()

    async def probed(num_threads: int) -> Machine:
        with tqdm(desc="measuring this machine", bar_format="{desc} …", disable=not has_bar, leave=False):
            return await probe(num_threads)

    # Before the worker starts its threads. What is elsewhere has so many as fit there, which only its start tells.
    is_local = engine.setup.launcher.is_local
    machine = await probed(worker_setups(engine.setup)[0].threads) if is_local else None
    await start_engine(engine)
    machine = machine or await probed(engine.worker_host.get("threads", 1))
    # Again, now that the number of KV blocks is known.
    check_cases(engine, cases, arguments.steps)
    host = engine.worker_host
    model = None
    # What a rank of several holds is not the whole model.
    if host.get("weight_bytes") and engine.setup.layout.num_ranks == 1:
        config = read_model(Path(engine.setup.model))
        quantization = engine.setup.config.model.quantization
        # Elsewhere than in the compiled forward pass, codes are unpacked.
        has_codes = sum(host["weight_bytes"].values()) < 2 * sum(num_matrix_weights(config).values())
        types = matrix_types(find_weights(Path(engine.setup.model), config), config, quantization) if has_codes else {}
        model = ModelFigures(
            config=config,
            weight_bytes=host["weight_bytes"],
            kv_token_bytes=host["kv_token_bytes"],
            integers=integer_matrices(config, quantization, types),
        )
    bench = StepBench(engine, num_steps=arguments.steps, temperature=arguments.temperature)
    times = []
    with tqdm(total=len(cases), unit=" cases", disable=not has_bar, leave=False) as bar:
        for case in cases:
            bar.set_description_str(str(case))
            times.append(case_times(await bench.measure(case), machine, model))
            bar.update()
    return machine, times
