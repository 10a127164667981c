"""How a run begins: its log is opened, and the engine core that writes it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from eventlm.bus.bus import Bus
from eventlm.bus.log_reader import read_history
from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.bus.recorder import Effect, Recorder
from eventlm.config.state_folder import runs_folder
from eventlm.core.predictor import Predictor
from eventlm.engine.block_names import BlockNames
from eventlm.engine.core_loop import RunClock
from eventlm.engine.engine_core import EngineCore, OnBroken, OnCondemned, Ship
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.plugins.failures import PluginFailures
from eventlm.engine.predictor.source import PredictorSource
from eventlm.engine.recording import make_recorder, make_writer
from eventlm.engine.replicas.grammar_builds import GrammarBuilds
from eventlm.engine.setup import EngineSetup, make_header
from eventlm.events import Event
from eventlm.metrics.components import RecorderMetrics, TimedCore
from eventlm.metrics.ended_rows import EndedRows
from eventlm.metrics.histograms import Histogram
from eventlm.metrics.store import MetricsStore
from eventlm.metrics.throughput_log import ThroughputLog
from eventlm.system.system import System
from eventlm.worker.protocol import WorkerReady

log = structlog.get_logger("eventlm.engine")


class RunParts(NamedTuple):
    """What of the engine a run is connected with. `metrics` sees its events and fills `rows`.

    guard: calls what it is given, and knows what to do if that raises.
    """

    clock: RunClock
    ship: Ship
    on_broken: OnBroken
    guard: Callable[[Effect], None]
    grammars: GrammarBuilds
    metrics: MetricsStore
    rows: EndedRows
    scheduling_time: Histogram
    system: System
    on_condemned: OnCondemned


class EngineRun(NamedTuple):
    """A run under way. Where nothing is recorded there is no `recorder` and no `folder`."""

    engine_core: EngineCore
    recorder: Recorder | None
    folder: Path | None

    @classmethod
    def open(
        cls, run: str, setup: EngineSetup, first: WorkerReady, predictor: PredictorSource, parts: RunParts
    ) -> EngineRun:
        """Open the log of the run with this name. `first`: what the first worker says of itself.

        Where nobody asked for a record, a disk that is full keeps the engine from recording, not from starting.
        """
        record = setup.config.record
        # Of the digests of steps; only the token log has it too.
        digest_key = parts.system.chance.token_bytes(32)
        begin = partial(_begin, run, setup, first, predictor, parts, digest_key)
        if record.folder:
            try:
                return begin(make_writer(record, run, digest_key))
            except LogWriteError as error:
                if Path(record.folder) != runs_folder() or record.record_tokens:
                    raise
                log.warning(f"not recording: {error} with --record DIR")
        return begin(None)

    def recorder_metrics(self, next_s: int) -> RecorderMetrics | None:
        """Figures of the log, where there is one. `next_s`: that of the event that comes next."""
        if self.recorder is None:
            return None
        writer = self.recorder.writer
        return RecorderMetrics(
            num_bytes=writer.num_bytes,
            num_events_behind=max(next_s - writer.next_s, 0),
            is_writing=not self.recorder.problem,
        )


def _begin(
    run: str,
    setup: EngineSetup,
    first: WorkerReady,
    predictor: PredictorSource,
    parts: RunParts,
    digest_key: bytes,
    writer: LogWriter | None,
) -> EngineRun:
    """The first thing that the engine core does is to write the header."""
    coefficients = predictor.coefficients(first.samples)
    seed = int.from_bytes(parts.system.chance.token_bytes(8), "little")
    header = make_header(
        setup, run, seed, coefficients, predictor.origin, first, unix_start_ns=parts.system.clock.unix_ns()
    )
    record = setup.config.record
    recorder = make_recorder(record, writer, parts.guard) if writer is not None else None
    folder = writer.run_folder if writer is not None else None
    bus = Bus(history=partial(_history, folder) if folder is not None else None, on_broken=_report_broken)
    bus.attach(parts.metrics.apply)
    bus.attach(PluginFailures().observe)
    if interval_s := setup.config.log.log_stats_interval_s:
        bus.attach(ThroughputLog(parts.metrics, interval_s=interval_s).observe)
    try:
        engine_core = EngineCore(
            header,
            TimedCore(
                setup.core,
                setup.plugins,
                Predictor.from_coefficients(coefficients),
                parts.scheduling_time,
                parts.system.clock,
            ),
            _make_live(setup, seed, header.block_table_size, parts.system.chance.token_bytes(32), digest_key),
            clock=parts.clock,
            bus=bus,
            ship=parts.ship,
            on_broken=parts.on_broken,
            recorder=recorder,
            rows=parts.rows,
            checkpoint_events=record.checkpoint_events,
            validate_every=record.validate_every,
            grammars=parts.grammars,
            on_condemned=parts.on_condemned,
        )
    except BaseException:
        if recorder is not None:
            with contextlib.suppress(LogWriteError):
                recorder.close()
        raise
    return EngineRun(engine_core, recorder, folder)


def _make_live(
    setup: EngineSetup, seed: int, block_table_size: int, names_key: bytes, digest_key: bytes
) -> LiveRequests:
    block_size = setup.core.block_size
    return LiveRequests(
        BlockNames(names_key, block_size=block_size, capacity=block_table_size),
        block_size=block_size,
        seed_key=seed.to_bytes(8, "little"),
        digest_key=digest_key,
        vocab_size=setup.vocab_size,
    )


def _history(folder: Path, first_s: int, last_s: int) -> Iterator[Event]:
    return read_history(folder, first_s, last_s)


def _report_broken(handler: object, event: Event, error: Exception) -> None:
    log.error("a broken observer was detached", observer=repr(handler), seq=event.s, error=repr(error))
