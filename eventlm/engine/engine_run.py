"""The start of a run: opens its log and makes the engine core that writes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from eventlm.bus.bus import Bus
from eventlm.bus.log_reader import read_history
from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.bus.recorder import Effect, Recorder, ThreadedRecorder
from eventlm.config import RecordConfig
from eventlm.config.state_folder import runs_folder
from eventlm.config.structs import memory_bytes
from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import SetParts
from eventlm.engine.block_names import BlockNames
from eventlm.engine.core_loop import RunClock
from eventlm.engine.engine_core import EngineCore, Forwarder, OnBroken, OnCondemned, Ship
from eventlm.engine.live_requests import LiveRequests, ServedModel
from eventlm.engine.plugins.failures import PluginFailures
from eventlm.engine.predictor.source import PredictorSource
from eventlm.engine.replicas.grammar_builds import GrammarBuilds
from eventlm.engine.setup import EngineSetup, StartedSet, make_header
from eventlm.events import Event, Header
from eventlm.metrics.components import SYNC_BUCKETS_NS, RecorderMetrics, TimedCore
from eventlm.metrics.histograms import Histogram
from eventlm.metrics.rows import EndedRows
from eventlm.metrics.store import MetricsStore
from eventlm.metrics.throughput_log import ThroughputLog
from eventlm.system.system import System
from eventlm.worker.protocol import WorkerReady

log = structlog.get_logger("eventlm.engine")


class RunParts(NamedTuple):
    """The parts of the engine that a run is connected with. `metrics` sees its events and fills `rows`.

    guard: makes a call and handles what it raises.
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
    forwarder: Forwarder | None = None


class ReadySet(NamedTuple):
    """A replicaset whose workers are up. first: the report of its first worker. predictor: knows its step times."""

    setup: EngineSetup
    first: WorkerReady
    predictor: PredictorSource


class EngineRun(NamedTuple):
    """A run under way. Without a record there is no `recorder` and no `folder`. sync_time: as of RecorderMetrics."""

    engine_core: EngineCore
    recorder: Recorder | None
    folder: Path | None
    sync_time: Histogram

    @classmethod
    def open(cls, run: str, sets: Sequence[ReadySet], parts: RunParts) -> EngineRun:
        """Open the log of the run with this name, for these replicasets.

        Unless a record was asked for, a full disk keeps the engine from recording, not from starting.
        """
        config = sets[0].setup.config
        record = config.record
        # Of the digests of steps; only the token log has it too.
        digest_key = parts.system.chance.token_bytes(32)
        sync_time = Histogram.over(SYNC_BUCKETS_NS)
        begin = partial(_begin, run, sets, parts, digest_key, sync_time)
        if record.folder:
            try:
                return begin(make_writer(parts.system, record, run, digest_key, sync_time.observe))
            except LogWriteError as error:
                if Path(record.folder) != runs_folder() or record.record_tokens or config.telemetry.otlp_endpoint:
                    raise
                log.warning(f"not recording: {error} with --record DIR")
        return begin(None)

    def recorder_metrics(self, next_s: int) -> RecorderMetrics | None:
        """Figures of the log, if there is one. `next_s`: the position of the next event."""
        if self.recorder is None:
            return None
        writer = self.recorder.writer
        return RecorderMetrics(
            num_bytes=writer.num_bytes,
            num_events_behind=max(next_s - writer.next_s, 0),
            is_writing=not self.recorder.problem,
            sync_time=self.sync_time.copy(),
        )


def make_writer(
    system: System, record: RecordConfig, run: str, digest_key: bytes, on_sync: Callable[[int], None] | None = None
) -> LogWriter:
    """The writer of a run; the key goes into its token log, if it has one. Raises LogWriteError."""
    folder = Path(record.folder)
    return LogWriter(
        system,
        folder,
        run,
        segment_bytes=memory_bytes(record.record_segment),
        keep_bytes=memory_bytes(record.record_keep),
        keep_all_runs=folder == runs_folder(),
        digest_key=digest_key if record.record_tokens else b"",
        syncs=record.record_sync != "none",
        on_sync=on_sync,
        on_problem=log.warning,
    )


def make_recorder(system: System, record: RecordConfig, writer: LogWriter, guard: Callable[[Effect], None]) -> Recorder:
    """The recorder on top of it, of the running loop. `guard`: as of ThreadedRecorder."""
    if record.record_lag == "wait" and record.record_sync == "none":
        return Recorder(writer)
    return ThreadedRecorder(
        system,
        writer,
        loop=asyncio.get_running_loop(),
        lag_seconds=None if record.record_lag == "wait" else record.record_lag_ms / 1000,
        lag_bytes=memory_bytes(record.record_lag_memory),
        sync_seconds={"none": None, "interval": record.record_sync_ms / 1000, "group": 0}[record.record_sync],
        on_problem=log.warning,
        guard=guard,
    )


def _begin(
    run: str,
    sets: Sequence[ReadySet],
    parts: RunParts,
    digest_key: bytes,
    sync_time: Histogram,
    writer: LogWriter | None,
) -> EngineRun:
    """Make the engine core, which first writes the header."""
    (setup, coefficients, first), *others = [
        StartedSet(each.setup, each.predictor.coefficients(each.first.samples), each.first) for each in sets
    ]
    seed = int.from_bytes(parts.system.chance.token_bytes(8), "little")
    header = make_header(
        setup,
        run,
        seed,
        coefficients,
        sets[0].predictor.origin,
        first,
        unix_start_ns=parts.system.clock.unix_ns(),
        others=others,
    )
    record = setup.config.record
    recorder = make_recorder(parts.system, record, writer, parts.guard) if writer is not None else None
    folder = writer.run_folder if writer is not None else None
    bus = Bus(
        history=partial(read_history, folder, disk=parts.system.disk) if folder is not None else None,
        on_broken=_report_broken,
    )
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
                [
                    SetParts(each.setup.core, each.setup.plugins, Predictor.from_coefficients(each.predictor))
                    for each in others
                ],
            ),
            _make_live(header, [setup, *(each.setup for each in others)], seed, parts.system, digest_key),
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
            forwarder=parts.forwarder,
        )
    except BaseException:
        if recorder is not None:
            with contextlib.suppress(LogWriteError):
                recorder.close()
        raise
    return EngineRun(engine_core, recorder, folder, sync_time)


def _make_live(
    header: Header, setups: Sequence[EngineSetup], seed: int, system: System, digest_key: bytes
) -> LiveRequests:
    first, *others = [
        ServedModel(
            setup.core.models,
            BlockNames(
                system.chance.token_bytes(32), block_size=setup.core.block_size, capacity=record.block_table_size
            ),
            setup.core.block_size,
            setup.vocab_size,
            setup.first_replica,
        )
        for setup, record in zip(setups, header.sets, strict=True)
    ]
    return LiveRequests(
        first.names,
        block_size=first.block_size,
        seed_key=seed.to_bytes(8, "little"),
        digest_key=digest_key,
        vocab_size=first.vocab_size,
        others=others,
    )


def _report_broken(handler: object, event: Event, error: Exception) -> None:
    log.error("a broken observer was detached", observer=repr(handler), seq=event.s, error=repr(error))
