"""The start of a run: opens its log and makes the engine core that writes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from msgspec import structs

from eventlm.bus.bus import Bus
from eventlm.bus.log_reader import read_history
from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.bus.recorder import Effect, Recorder, ThreadedRecorder
from eventlm.bus.segment_file import SegmentFile
from eventlm.bus.spool import SpoolWriter
from eventlm.config import Config, RecordConfig
from eventlm.config.state_folder import runs_folder
from eventlm.config.structs import memory_bytes
from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import SetParts
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.engine.clock import AsyncioClock
from eventlm.engine.engine_core import EngineCore, Forwarder, OnBroken, OnCondemned, Ship
from eventlm.engine.live_requests import LiveRequests, make_live
from eventlm.engine.plugins.failures import PluginFailures
from eventlm.engine.predictor.source import PredictorSource
from eventlm.engine.recovery.carrying_over import carry_over
from eventlm.engine.recovery.dead_run import CarriedRequests, RecoveredRun
from eventlm.engine.recovery.recover import spool_folder
from eventlm.engine.replicas.grammar_builds import GrammarBuilds
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.request_spool import RequestSpool
from eventlm.engine.setup import EngineSetup, StartedSet, make_header
from eventlm.events import Event, Header
from eventlm.metrics.components import SYNC_BUCKETS_NS, RecorderMetrics, TimedCore
from eventlm.metrics.histograms import Histogram
from eventlm.metrics.rows import EndedRows
from eventlm.metrics.store import MetricsStore
from eventlm.metrics.throughput_log import ThroughputLog
from eventlm.system.system import System
from eventlm.system.whole_file import exit_code_of
from eventlm.worker.protocol import WorkerReady

log = structlog.get_logger("eventlm.engine")


class RunParts(NamedTuple):
    """The parts of the engine that a run is connected with. `metrics` sees its events and fills `rows`.

    guard: makes a call and handles what it raises. num_recoveries: how often an engine has died in this run.
    """

    clock: AsyncioClock
    ship: Ship
    on_broken: OnBroken
    guard: Callable[[Effect], None]
    grammars: GrammarBuilds
    metrics: MetricsStore
    rows: EndedRows
    scheduling_time: Histogram
    system: System
    on_condemned: OnCondemned
    registry: RequestRegistry
    forwarder: Forwarder | None = None
    num_recoveries: int = 0


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
    def go_on(cls, recovered: RecoveredRun, setups: Sequence[EngineSetup], parts: RunParts) -> EngineRun:
        """Go on with the run of an engine that has died. Raises LogWriteError."""
        header, live = recovered.header, recovered.live
        sync_time = Histogram.over(SYNC_BUCKETS_NS)
        spool_writer = SpoolWriter(parts.system.disk, recovered.spool_folder)
        if recovered.has_loss:
            # The cut takes away what shows it.
            spool_writer.note_loss()
        try:
            last = recovered.last_segment(parts.system.disk)
        except OSError as error:
            raise LogWriteError(
                f"cannot go on with the trace {recovered.folder}: {error.strerror}", exit_code=exit_code_of(error)
            ) from error
        # A run with a token log has one to its end.
        record = structs.replace(setups[0].config.record, record_tokens=header.level == "tokens")
        writer = make_writer(
            parts.system,
            record,
            header.run,
            live.digest_key,
            sync_time.observe,
            spool=spool_writer,
            last=last,
        )
        return _attach(header, recovered.core, live, setups, parts, sync_time, writer, spool_writer)

    @classmethod
    def open(
        cls, run: str, sets: Sequence[ReadySet], parts: RunParts, carried: CarriedRequests | None = None
    ) -> EngineRun:
        """Open the log of the run with this name, for these replicasets. carried: the requests that it begins with.

        Unless a record was asked for, a full disk keeps the engine from recording, not from starting.
        """
        config = sets[0].setup.config
        record = config.record
        # Of the digests of steps; only the token log has it too.
        digest_key = parts.system.chance.token_bytes(32)
        sync_time = Histogram.over(SYNC_BUCKETS_NS)
        begin = partial(_begin, run, sets, parts, digest_key, sync_time, carried)
        if record.folder:
            spool_writer = None
            if record.recover:
                spool_writer = SpoolWriter(parts.system.disk, spool_folder(parts.system, record.recover) / run)
            try:
                writer = make_writer(parts.system, record, run, digest_key, sync_time.observe, spool=spool_writer)
                try:
                    return begin(writer, spool_writer)
                except BaseException:
                    writer.close()
                    raise
            except LogWriteError as error:
                if _is_asked_for(config):
                    raise
                log.warning(f"not recording: {error} with --record DIR")
        return begin(None, None)

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


def _is_asked_for(config: Config) -> bool:
    """Whether an engine that cannot record must not start."""
    record = config.record
    return bool(
        Path(record.folder) != runs_folder() or record.record_tokens or record.recover or config.telemetry.otlp_endpoint
    )


def make_writer(
    system: System,
    record: RecordConfig,
    run: str,
    digest_key: bytes,
    on_sync: Callable[[int], None] | None = None,
    *,
    spool: SpoolWriter | None = None,
    last: SegmentFile | None = None,
) -> LogWriter:
    """The writer of a run; the key goes into its token log, if it has one. spool, last: as of LogWriter.

    Raises LogWriteError.
    """
    folder = Path(record.folder)
    return LogWriter(
        system,
        folder,
        run,
        segment_bytes=memory_bytes(record.record_segment),
        keep_bytes=memory_bytes(record.record_keep),
        keep_all_runs=folder == runs_folder(),
        digest_key=digest_key if record.record_tokens else b"",
        spool=spool,
        last=last,
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
    carried: CarriedRequests | None,
    writer: LogWriter | None,
    spool_writer: SpoolWriter | None,
) -> EngineRun:
    """Make the engine core, which first writes the header."""
    started = [StartedSet(each.setup, each.predictor.coefficients(each.first.samples), each.first) for each in sets]
    (setup, coefficients, first), *others = started
    seed = int.from_bytes(parts.system.chance.token_bytes(8), "little")
    header = make_header(
        setup,
        run,
        seed,
        coefficients,
        sets[0].predictor.origin,
        first,
        unix_start_ns=parts.system.clock.unix_ns() if carried is None else int(carried.header.unix_start_ns),
        others=others,
    )
    core_parts = [
        SetParts(each.setup.core, each.setup.plugins, Predictor.from_coefficients(each.predictor)) for each in started
    ]
    setups = [setup, *(each.setup for each in others)]
    live = make_live(
        header,
        setups,
        block_names=[(parts.system.chance.token_bytes(32), 1) for _ in sets],
        digest_key=digest_key,
    )
    if carried is None:
        core = Core(*core_parts[0], core_parts[1:])
    else:
        core = carry_over(carried, header, setups, core_parts, live, parts.registry)
        if carried.may_lack_outputs(parts.system.clock):
            parts.registry.rewind()
        begun = structs.replace(header, ts=core.state.now_ns)
        parts.metrics.take_up(begun, msgspec.json.decode(core.snapshot(), type=StateSnapshot), [])
    previous_h = None if carried is None else carried.end.last_h
    return _attach(header, core, live, setups, parts, sync_time, writer, spool_writer, previous_h)


def _attach(
    header: Header,
    core: Core,
    live: LiveRequests,
    setups: Sequence[EngineSetup],
    parts: RunParts,
    sync_time: Histogram,
    writer: LogWriter | None,
    spool_writer: SpoolWriter | None,
    previous_h: str | None = None,
) -> EngineRun:
    """Connect a core with the parts of the engine. Its first lines are written. previous_h: of a core with the requests
    of another run, the hash of the last line of that; None for all others.
    """
    config = setups[0].config
    record = config.record
    recorder = make_recorder(parts.system, record, writer, parts.guard) if writer is not None else None
    folder = writer.run_folder if writer is not None else None
    bus = Bus(
        next_s=core.next_seq,
        history=partial(read_history, folder, disk=parts.system.disk) if folder is not None else None,
        on_broken=_report_broken,
    )
    bus.attach(parts.metrics.apply)
    bus.attach(PluginFailures().observe)
    if interval_s := config.log.log_stats_interval_s:
        bus.attach(ThroughputLog(parts.metrics, interval_s=interval_s).observe)
    spool = None
    if spool_writer is not None and folder is not None:
        boot_id = parts.system.clock.boot_id()
        spool = RequestSpool(
            spool_writer,
            live,
            parts.registry,
            trace=parts.system.disk.resolve(folder),
            boot_id=boot_id,
            origin_ns=parts.clock.origin_ns,
            num_recoveries=parts.num_recoveries,
            outputs_wait_for_syncs=record.record_sync == "group",
            first_s=core.next_seq,
        )
    is_new = not core.next_seq
    try:
        engine_core = EngineCore(
            header,
            TimedCore(core, parts.scheduling_time, parts.system.clock),
            live,
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
            spool=spool,
        )
        if previous_h is not None:
            engine_core.follow(previous_h)
        elif not is_new:
            engine_core.go_on()
    except BaseException:
        if recorder is not None:
            with contextlib.suppress(LogWriteError):
                recorder.close()
        raise
    return EngineRun(engine_core, recorder, folder, sync_time)


def _report_broken(handler: object, event: Event, error: Exception) -> None:
    log.error("a broken observer was detached", observer=repr(handler), seq=event.s, error=repr(error))
