"""What the commands have in common that run an engine of their own and end: `generate`, `chat`, `bench`."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from eventlm.cli.progress import start_progress
from eventlm.config import Config

if TYPE_CHECKING:
    from eventlm.bootstrap.composition import Composition
    from eventlm.engine.inference_engine import InferenceEngine


def run_in_loop(config: Config, work: Coroutine[Any, Any, int]) -> int:
    """Set up the log and await `work`, which is the exit code, in a loop of its own."""
    # Only now: `--help`, `--print-config` and mistakes need not wait for the engine to be loaded.
    import uvloop

    from eventlm.cli.logging_setup import configure_logging

    configure_logging(config.log, default_level="warning")
    return uvloop.run(work)


def compose_and_warn(config: Config) -> Composition:
    """Compose an engine and print what the user should know of it. Raises what `compose` raises."""
    from eventlm.bootstrap.composition import compose

    composed = compose(config)
    print_warnings(composed.warnings)
    return composed


async def start_engine(engine: InferenceEngine) -> None:
    """Start an engine, and show meanwhile what its workers do. Raises what its `start` raises."""
    with start_progress(engine.setup.core.num_replicas) as on_progress:
        await engine.start(on_progress)


def print_warnings(warnings: Iterable[str]) -> None:
    """Say what the user should know of an engine."""
    for warning in warnings:
        print(f"eventlm: warning: {warning}", file=sys.stderr)
