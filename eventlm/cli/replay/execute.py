"""`eventlm replay TRACE --execute`: run the recorded schedule on the model again and compare every token."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from eventlm.cli.output import file_progress, warn
from eventlm.cli.parser import Parser, add_number
from eventlm.cli.replay.replicasets import OwnChanges
from eventlm.cli.trace_path import trace_file
from eventlm.config.structs import MAX_THREADS
from eventlm.errors import CheckpointError, EventLMError, PullError, UsageError

if TYPE_CHECKING:
    from eventlm.core.shards import Layout
    from eventlm.events import Header

#: Flags that mean something with `--execute` only: their names in the arguments.
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "kv_parallel_size")
OWN_FLAGS = ("model", "threads", "teacher_force", *SIZES)


def configure(parser: Parser) -> None:
    """Add the flags of a re-execution."""
    group = parser.add_argument_group("re-execution")
    group.add_argument(
        "--execute",
        action="store_true",
        help="run the recorded steps on the model again, same batches and blocks, and compare every token; needs a "
        "trace that was recorded with --record-tokens, and proves most on the host that recorded it",
    )
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="the model that ran, if it is no longer where the trace says, or not in the cache: a folder or name",
    )
    add_number(group, "--threads", "compute threads of a worker (default: as recorded)")
    add_number(
        group,
        "--pipeline-parallel-size",
        "stages to run a replica in (default: as recorded); the tokens are the same",
        least=1,
    )
    for name, noun in (("tensor", "tensor ranks"), ("kv", "KV groups")):
        add_number(
            group,
            f"--{name}-parallel-size",
            f"{noun} of a replica: as recorded, since the sums of others have other last bits",
            least=1,
        )
    group.add_argument(
        "--teacher-force",
        action="store_true",
        default=None,
        help="after a token that differs, go on with the recorded one, and list all that differ",
    )


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for flags that contradict each other."""
    if not arguments.execute:
        for name in OWN_FLAGS:
            if getattr(arguments, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} needs --execute: `eventlm replay TRACE --execute {flag} ...`")
    if arguments.threads is not None and not 1 <= arguments.threads <= MAX_THREADS:
        raise UsageError(f"--threads {arguments.threads}: 1 to {MAX_THREADS} are possible")


def run(arguments: argparse.Namespace, of_sets: dict[str, OwnChanges]) -> int:
    """Print how many tokens came out as recorded, or what did not; returns 0 or the code of what went wrong."""
    from functools import partial

    from eventlm.bootstrap.device import devices_of_run
    from eventlm.cli.logging_setup import configure_logging
    from eventlm.config import LogConfig
    from eventlm.replay.execute.executable import check_executable
    from eventlm.replay.execute.execution import execute
    from eventlm.replay.execute.report import render, render_json
    from eventlm.replay.execute.workers import WorkerProcesses

    configure_logging(LogConfig(), default_level="warning")
    path = trace_file(arguments.trace)
    header = check_executable(path)
    devices = devices_of_run(header)
    models = _models(header, arguments.model, of_sets)
    with file_progress("re-executing", path, min_bytes=0) as on_progress:
        result = execute(
            path,
            model=models[0],
            others=models[1:],
            threads=arguments.threads,
            layouts=_layouts(header, arguments),
            teacher_force=bool(arguments.teacher_force),
            strict=arguments.strict,
            on_progress=on_progress,
            make_workers=partial(WorkerProcesses, devices=devices),
        )
    print(render_json(result) if arguments.json else render(result))
    warn(result.warnings)
    return result.exit_code


def _layouts(header: Header, arguments: argparse.Namespace) -> list[Layout]:
    """Those of the recorded replicasets, with the sizes that are given."""
    from eventlm.core.recorded_layouts import recorded_layouts
    from eventlm.core.shards import Layout

    sizes = (arguments.tensor_parallel_size, arguments.pipeline_parallel_size, arguments.kv_parallel_size)
    layouts, sets = recorded_layouts(header), header.sets_of_replicas()
    found = []
    for number in range(len(header.sets)):
        recorded = layouts[sets.index(number)]
        given = zip(sizes, (recorded.tensor, recorded.stages, recorded.groups), strict=True)
        found.append(Layout(*(size or was for size, was in given)))
    return found


def _models(header: Header, given: str | None, of_sets: dict[str, OwnChanges]) -> list[str]:
    """The model of each replicaset."""
    from eventlm.bootstrap.option_checks import errors_of_set
    from eventlm.replay.rebuild import check_set_names

    check_set_names(header, of_sets)
    names = [each.name for each in header.sets]
    if given is not None and len(names) > 1:
        raise UsageError(
            f"--model {given}: the run has the replicasets {', '.join(names)}; give --replicaset NAME:model={given}"
        )
    own = {name: changes.model for name, changes in of_sets.items()}
    found = []
    for number, name in enumerate(names):
        with errors_of_set(name, is_alone=len(names) == 1):
            found.append(_model(header, number, own.get(name, given)))
    return found


def _model(header: Header, number: int, given: str | None) -> str:
    """The folder of the model that a replicaset ran, or the fake one, found as `serve` finds it.

    Nothing is fetched because a trace names it: a trace may come from anywhere.
    """
    from eventlm.bootstrap.model_source import find_model
    from eventlm.replay.execute.executable import recorded_model
    from eventlm.worker.protocol import FAKE_MODEL

    try:
        folder = find_model(recorded_model(header, given, number), may_fetch=given is not None).folder
    except (CheckpointError, PullError) as error:
        if given is not None:
            raise
        where, joint = ("not there", ";") if isinstance(error, CheckpointError) else ("not in the cache", ", or")
        flag = f"--replicaset {header.sets[number].name}:model=FOLDER" if header.replicasets else "--model"
        message = f"the trace names a model that is {where}: {error}{joint} give it with {flag}"
        raise EventLMError(message, exit_code=error.exit_code) from error
    return FAKE_MODEL if folder is None else str(folder)
