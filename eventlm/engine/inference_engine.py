"""InferenceEngine: the public API of the engine. Owns the bus, the log and the replicas.

Everything asynchronous ends in a pending fact; one drain for each tick of the loop applies what is pending. Loop
timers only wake the drain: due timers are the core's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import structlog
from msgspec import UNSET

from eventlm.bus.bus import Bus
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.spool import remove_spool
from eventlm.engine.admin import (
    AdminAction,
    Drain,
    EngineStatus,
    Pause,
    Restart,
    RestartError,
    Resume,
    carry_out,
    reply_named,
    status_of,
)
from eventlm.engine.backend import AnswerDelta, AnswerEnd, AttemptId, BackendError
from eventlm.engine.backends import actions as backend_actions
from eventlm.engine.backends.actions import BackendAction
from eventlm.engine.backends.backend_set import BackendSet, BackendStatus
from eventlm.engine.backends.forwarder import HttpForwarder
from eventlm.engine.backends.outage import Outages
from eventlm.engine.clock import AsyncioClock
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.engine_run import EngineRun, ReadySet, RunParts
from eventlm.engine.explanations import ExplainResponse, Explanations
from eventlm.engine.group_admission import Admission, AdmissionParts, check_room_to_search, with_cache_rules
from eventlm.engine.object_store.actions import Objects
from eventlm.engine.object_store.store import ObjectStore
from eventlm.engine.oldest_requests import OldestRequests, longest_wait_ns, oldest_requests
from eventlm.engine.predictor.source import PredictorSource
from eventlm.engine.rate_limits import NO_LIMITS, RateLimiter, RateLimits
from eventlm.engine.recovery.dead_run import CarriedRequests, DeadRun, Followers, RecoveredRun
from eventlm.engine.recovery.fitting import fitting, is_own, takeover
from eventlm.engine.recovery.recover import check_spool_folder, recover, spool_folder
from eventlm.engine.replicas.grammar_builds import GrammarBuilds
from eventlm.engine.replicas.group import OnStartProgress, Replicas
from eventlm.engine.reports import Reports
from eventlm.engine.request import (
    AT_SHUTDOWN,
    BY_OWNER,
    BY_RECOVERY,
    CLIENT_LEFT,
    OUTPUT_FAILED,
    EngineUnavailableError,
    IdempotencyKey,
    ModelBusyError,
    ModelState,
    OnOutput,
    Request,
    RequestHandle,
    ResumedReply,
    Submission,
    UnknownReplyError,
)
from eventlm.engine.request_check import check_group
from eventlm.engine.request_registry import ReplyStatus, RequestRegistry, reply_status
from eventlm.engine.setup import EngineSetup, make_run_id, worker_setups
from eventlm.errors import EventLMError, InvariantError
from eventlm.events import Cancelled, Fact, FrontEndLost, Recovered, WorkerLost, WorkerUp
from eventlm.grammars import GrammarError
from eventlm.launchers.launcher import StartedRank
from eventlm.metrics.components import SCHEDULING_BUCKETS_NS, CacheInfo, EngineMetrics
from eventlm.metrics.histograms import Histogram
from eventlm.metrics.rows import EndedRows
from eventlm.metrics.store import MetricsStore
from eventlm.system.left_process import LeftProcess
from eventlm.system.system import System
from eventlm.telemetry.endpoint import traces_url
from eventlm.telemetry.exporter import SpanExporter
from eventlm.types import NANOSECONDS_PER_SECOND, TimeWindow
from eventlm.worker.protocol import StepResult

EngineState = Literal["loading", "ready", "draining", "dead"]

log = structlog.get_logger("eventlm.engine")


class InferenceEngine:
    """Serves one model on one or more replicas, or several of them. Use within one event loop: `start`, `submit`,
    `stop`.

    others: the further replicasets, whose replicas have the numbers after those of the sets before.
    """

    def __init__(self, setup: EngineSetup, system: System, others: Sequence[EngineSetup] = ()) -> None:
        #: Of each replicaset.
        self.setups = [setup, *others]
        self._system = system
        #: Called after each change of the state, of `paused`, of `has_worker` and of `num_waiting_for_room`.
        self.on_state: list[Callable[[], None]] = []
        #: Makes another engine ready to go on in this one's place. Raises RestartError if none can.
        self.on_restart: Callable[[], Awaitable[None]] = _cannot_restart
        self._state: EngineState = "loading"
        self.server_id = system.chance.identity("server-")
        self.model_names = [name for each in self.setups for name in each.core.models]
        self._set_numbers = {name: number for number, each in enumerate(self.setups) for name in each.core.models}
        self._clock = AsyncioClock(system.clock, self._wake)
        self._engine_core: EngineCore | None = None
        #: Groups that are neither admitted nor rejected yet.
        self._undecided: list[Admission] = []
        self._run: EngineRun | None = None
        #: The compute back end, as the first worker reports it.
        self.worker_host: dict[str, Any] = {}
        self._rows = EndedRows()
        self._metrics = MetricsStore(sink=self._rows)
        #: The run of an engine that has died, or what another one has left.
        self._recovered: RecoveredRun | None = None
        self._carried: CarriedRequests | None = None
        #: Of one that cannot be gone on with.
        self._lost_spools: list[Path] = []
        #: Why the engine before has ended, in words, if that is known.
        self.follows = ""
        #: When that was, on this host's monotonic clock, if that is known.
        self.follows_ns = 0
        #: Its workers, if they outlive it.
        self.left_workers: Sequence[LeftProcess] = ()
        #: Called when `lasting_workers` may have changed.
        self.on_left: Callable[[], None] = lambda: None
        #: Its requests of which something is lost, with all others of their replies.
        self._damaged: set[int] = set()
        #: Whether edges of such a run may have lived on and come back; then `edges_have_left` must be called.
        self.edges_return = False
        #: Called when edges have died whose replies go on.
        self.on_orphans: Callable[[], None] = lambda: None
        self._scheduling_time = Histogram.over(SCHEDULING_BUCKETS_NS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        #: The core failed: its state is unknown, so nothing more is written.
        self._broken = False
        #: Why it died, for later callers.
        self._death: EngineUnavailableError | None = None
        self._drain_scheduled = False
        self.registry = self._make_registry()
        self.object_store = ObjectStore(system, setup.config.server)
        #: What is kept between requests.
        self.objects = Objects(self.object_store.carry_out)
        self._replicas = Replicas(system, self.setups, self, self._replica_dead)
        self._backends = HttpForwarder(self.setups, self)
        self._outages = Outages(
            is_up=lambda number: self._backends.sets[number].is_up,
            later=self._while_alive,
            now_ns=self.now_ns,
            state=lambda: None if self._engine_core is None else self._engine_core.core.state,
            end=self._end_waiting,
        )
        #: Grammars of live requests. The replicas report their workers to it.
        self.grammars = GrammarBuilds(self._replicas.prepare_grammar, self._grammar_ready, self._while_alive)
        self._limiter = RateLimiter()
        self._span_exporter: SpanExporter | None = None
        self._explanations = Explanations(system.processes)
        self._reports = Reports(system.processes)

    def _make_registry(self) -> RequestRegistry:
        return RequestRegistry.of(self.setup.config.server, self.now_ns, self.cancel, self._expire_later)

    @property
    def _admission_parts(self) -> AdmissionParts:
        return AdmissionParts(
            registry=self.registry,
            limiter=self._limiter,
            end_text=self.end_text,
            cancel=self.cancel,
            watch_grammar=self.grammars.watch,
            note_caller=self._note_caller,
        )

    @property
    def state(self) -> EngineState:
        """Only a ready engine takes requests."""
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        self._tell_state()

    def _tell_state(self) -> None:
        for tell in [*self.on_state]:
            try:
                tell()
            except Exception:
                log.exception("a callback for the engine's state failed: this is a defect, please report it")

    @property
    def setup(self) -> EngineSetup:
        """Of the first replicaset."""
        return self.setups[0]

    @property
    def max_model_len(self) -> int:
        """The longest context in tokens, of the first replicaset. Start-up may lower it to what the workers' caches
        hold.
        """
        return self.setup.core.max_model_len

    @property
    def models(self) -> dict[str, ModelState]:
        """Each model that requests may name."""
        return {
            name: ModelState(self.setups[number].core.max_model_len, self._set_has_worker(number))
            for name, number in self._set_numbers.items()
        }

    def _set_has_worker(self, number: int) -> bool:
        backends = self._backends.sets.get(number)
        return self._replicas.set_has_worker(number) if backends is None else backends.is_up

    def _number_of(self, group: Sequence[Request]) -> int:
        """The replicaset of a group: that of its model, else the first. Raises EngineUnavailableError if it has no
        worker left.
        """
        number = self._set_numbers.get(group[0].scheduling.model, 0)
        if not self._replicas.num_live[number]:
            raise EngineUnavailableError(f"no worker of the model {self.setups[number].core.models[0]!r} is left")
        return number

    def _check_takes(self, model: str, gives_way_ns: int) -> None:
        """Raise ModelBusyError as `Submission.gives_way_ns` says."""
        number = self._set_numbers.get(model, 0)
        if not self._set_has_worker(number):
            raise ModelBusyError(f"no replica of the model {model!r} is up")
        waiting_ns = longest_wait_ns(self._require_engine_core().core.state, number, self.now_ns())
        if 0 < gives_way_ns <= waiting_ns:
            raise ModelBusyError(f"requests for the model {model!r} wait for {waiting_ns // 1_000_000} ms")

    @property
    def paused(self) -> bool:
        """Whether an operator has paused launches."""
        return self._engine_core is not None and self._engine_core.core.state.paused

    @property
    def has_worker(self) -> bool:
        """Whether any replica has a worker, or is another server that is up. Without one, requests wait."""
        return self._replicas.has_worker or self._backends.is_up

    @property
    def num_waiting_for_room(self) -> int:
        """Replicas that wait until their launcher has room for a worker."""
        return self._replicas.num_waiting_for_room

    def room_changed(self) -> None:
        """As ReplicaOwner.room_changed."""
        self._tell_state()

    def left_changed(self) -> None:
        """As ReplicaOwner.left_changed."""
        self.on_left()

    @property
    def origin_ns(self) -> int:
        """The time on this host's monotonic clock at which the run's clock is 0."""
        return self._clock.origin_ns

    def now_ns(self) -> int:
        """Nanoseconds since the run started."""
        return self._clock.now_ns()

    @property
    def bus(self) -> Bus:
        """Every event of the run. There is none before `start`."""
        return self._require_engine_core().bus

    @property
    def run_folder(self) -> Path | None:
        """Where the run is recorded; None before `start`, and if it is not recorded."""
        return self._run.folder if self._run is not None else None

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers by replica, of several ranks that of the first; 0 for a replica without one."""
        return self._replicas.worker_pids

    @property
    def lasting_workers(self) -> list[LeftProcess]:
        """Those that another engine could take over from this one."""
        return self._replicas.left

    @property
    def rank_pids(self) -> list[list[int]]:
        """Process ids of the ranks of each replica; none for a replica without a worker."""
        return self._replicas.rank_pids

    def metrics(self) -> EngineMetrics:
        """All current figures; those of the log are missing before `start`."""
        return EngineMetrics(
            log=self._metrics.snapshot(),
            state=self.state,
            paused=self.paused,
            num_waiting_for_room=self.num_waiting_for_room,
            num_recoveries=self._num_recoveries,
            scheduling_time=self._scheduling_time.copy(),
            now_ns=self.now_ns(),
            recorder=self._run.recorder_metrics(self._metrics.next_s) if self._run is not None else None,
            rate_limited=dict(self._limiter.refused),
            cache=self._cache_info(self.setup) if self._run is not None else None,
            other_caches=[self._cache_info(each) for each in self.setups[1:]],
            span_export=self._span_exporter.metrics(self._metrics.next_s) if self._span_exporter is not None else None,
        )

    @staticmethod
    def _cache_info(setup: EngineSetup) -> CacheInfo:
        core, config = setup.core, setup.config
        return CacheInfo(
            block_size=core.block_size,
            num_blocks=core.blocks_per_replica,
            prefix_cache=config.cache.prefix_cache,
            dtype=config.cache.kv_cache_dtype,
            gpu_memory_utilization=config.gpu.gpu_memory_utilization,
        )

    async def read_metrics(self) -> EngineMetrics:
        """As `metrics`, for callers that may be in another process."""
        return self.metrics()

    async def start(self, on_progress: OnStartProgress | None = None, *, spawned: Sequence[StartedRank] = ()) -> None:
        """Start the workers, fit the predictor, open the log. Takes, reports and raises what `Replicas.start` does."""
        self._loop = asyncio.get_running_loop()
        run = make_run_id(self._system)
        folder = self.setup.config.record.folder
        try:
            if folder:
                LogWriter.check_folder(self._system.disk, folder)
            await self.object_store.open()
            self._recover()
            predictors = [
                PredictorSource(setup.config, next(iter(worker_setups(setup)), None)) for setup in self.setups
            ]
            started = await self._replicas.start(
                must_measure=[self._recovered is None and each.must_measure for each in predictors],
                spawned=spawned,
                left=self.left_workers,
                on_progress=on_progress,
            )
            self.setups = [setup for setup, _ in started]
            await self._backends.start()
            parts = RunParts(
                clock=self._clock,
                ship=self._replicas.ship,
                on_broken=self._cancel_broken,
                guard=self._guarded,
                grammars=self.grammars,
                metrics=self._metrics,
                rows=self._rows,
                scheduling_time=self._scheduling_time,
                system=self._system,
                on_condemned=self._replicas.request_condemned,
                registry=self.registry,
                num_recoveries=self._num_recoveries,
                forwarder=self._backends if self._backends.sets else None,
            )
            if self.state != "loading":
                raise EngineUnavailableError("the engine was stopped while it started")
            sets = [ReadySet(*each, predictor) for each, predictor in zip(started, predictors, strict=True)]
            if self._recovered is None:
                self._run = EngineRun.open(run, sets, parts, self._carried)
                for spool in self._lost_spools:
                    remove_spool(self._system.disk, spool)
            else:
                self._run = EngineRun.go_on(self._recovered, self.setups, parts)
            self._engine_core = self._run.engine_core
            if self._left is not None:
                self._take_over(self._left)
            self.worker_host = sets[0].first.host
        except BaseException as error:
            self.state = "dead"
            await self._replicas.stop()
            await self._backends.stop()
            if self._left is not None:
                is_known = isinstance(error, EventLMError | asyncio.CancelledError)
                if self._engine_core is None and is_known and not isinstance(error, InvariantError):
                    # No worker could start, for example, or the disk was full.
                    self._left.forget_attempts(self._system.disk)
                # The next engine may still go on with it.
                self._left.file.close()
            raise
        self._replicas.run()
        self._backends.run()
        self._export_spans()
        self._drain()
        self.state = "ready"

    def _recover(self) -> None:
        """Look for a run to go on with; the workers will be those of its next epochs."""
        record = self.setup.config.record
        if not record.recover:
            return
        folder = spool_folder(self._system, record.recover)
        check_spool_folder(self._system.disk, folder)

        found = recover(
            self._system.disk,
            Path(record.folder),
            folder,
            is_own=lambda header: is_own(header, self.setups),
            takeover_of=lambda header: takeover(header, self.setups, self._make_followers),
            on_lost=self._lost_spools.append,
        )
        if found is None:
            return
        self._clock.go_on(found.origin_ns(self._system.clock))
        if isinstance(found, CarriedRequests):
            self._carried = found
            return
        self._recovered = found
        self.setups = fitting(found.header, self.setups) or self.setups
        self.registry, self._metrics, self._rows = found.followers
        if found.may_lack_outputs(self._system.clock):
            self.registry.rewind()
        # Before the next spool begins with what is kept of replies that are over.
        self._damaged = found.damaged | self.registry.forget_damaged(found.damaged)
        self._replicas.go_on(self.setups, found.epochs)
        self._backends.go_on(found.epochs)

    @property
    def _left(self) -> DeadRun | None:
        """What an engine before this one has left."""
        return self._recovered or self._carried

    @property
    def _num_recoveries(self) -> int:
        """How often an engine has taken over from another in this run, or with its requests in those before."""
        return 0 if self._left is None else self._left.head.num_recoveries + 1

    def _make_followers(self) -> Followers:
        rows = EndedRows()
        return Followers(self._make_registry(), MetricsStore(sink=rows), rows)

    def _take_over(self, found: DeadRun) -> None:
        """Let the requests of a run go on whose clients can come back for them."""
        # Without a keeper, the time of its last event is the best that is known.
        ended_ns = max(self.follows_ns - self.origin_ns, found.now_ns)
        down_ns = max(self.now_ns() - ended_ns, 0)
        reason = self.follows or found.reason(self._system.clock)
        run = "" if found is self._recovered else found.header.run
        self.put_fact(Recovered(reason=reason, down_ns=down_ns, run=run))
        self._drain()
        live = self._require_engine_core().live
        lost = [request for request in live.requests if request in self._damaged]
        for request in lost:
            live.fail_request(request, EngineUnavailableError("a part of the request was lost when its engine died"))
        # Only now, so that clients have all the time to come back that they are promised.
        forgotten = [] if self.edges_return else self.registry.edges_have_left(live.requests)
        for request in dict.fromkeys([*lost, *forgotten]):
            self.cancel(request, BY_RECOVERY)
        self._drain()
        self._check_alive()
        if found is self._recovered:
            found.forget_attempts(self._system.disk)
        else:
            remove_spool(self._system.disk, found.spool_folder)
            found.file.close()
        log.warning(
            "the requests of a run go on in another one" if run else "the run of an engine that died goes on",
            run=found.header.run,
            down_ms=down_ns // 1_000_000,
            requests=len(live),
            cancelled=len(forgotten),
            damaged=len(lost),
            **({"cut": found.cut} if found.cut else {}),
        )

    def _export_spans(self) -> None:
        endpoint = self.setup.config.telemetry.otlp_endpoint
        if endpoint and self.run_folder is not None:
            self._span_exporter = SpanExporter(self._system, self.run_folder, traces_url(endpoint))
            self._span_exporter.start()

    def _note_caller(self, traceparent: str, requests: list[int]) -> None:
        if self._span_exporter is not None:
            self._span_exporter.note_caller(traceparent, requests)

    def _expire_later(self, delay_ns: int) -> None:
        assert self._loop is not None
        self._loop.call_later(delay_ns / 1e9, self._expire)

    def _expire(self) -> None:
        self.registry.expire()
        if self._engine_core is not None:
            self._engine_core.note_over()

    async def submit(
        self,
        group: Sequence[Request],
        *,
        submission: Submission | None = None,
        on_output: OnOutput | None = None,
    ) -> list[RequestHandle]:
        """Admit a group as one; a handle for each request.

        With a `submission` the `registry` finds the group by its id. With `on_output` all outputs go there in the
        engine's order, and the handles cannot be iterated over. Raises QueueFullError, EngineUnavailableError,
        RateLimitError for a submission over its limits, ModelBusyError for one that gives way, UnknownReplyError for
        one to a search that is over, KeyTakenError or KeyReusedError for one whose idempotency key a reply has, and
        what `check_group` raises. If the caller is cancelled while it waits, so are the requests.
        """
        if submission is not None and submission.idempotency_key is not None:
            await self._check_key(submission)
        # A drain lets running searches finish.
        goes_on = submission is not None and submission.goes_on and self.state == "draining"
        if self.state != "ready" and (self._is_stopping or not goes_on):
            raise self._death or EngineUnavailableError(f"the engine is {self.state}")
        if not group:
            return []
        if submission is not None and submission.gives_way_ns >= 0:
            self._check_takes(group[0].scheduling.model, submission.gives_way_ns)
        number = self._number_of(group)
        setup = self.setups[number]
        check_group(group, setup.core, vocab_size=setup.vocab_size, submission=submission)
        group = with_cache_rules(group, submission, setup.config.cache)
        engine_core = self._require_engine_core()
        if submission is not None and submission.search_sequences and not group[0].scheduling.offline:
            num_taken = self.registry.num_searched + engine_core.core.state.replicasets[number].num_waiting
            check_room_to_search(submission, setup.core, num_taken)
        admission = Admission(self._admission_parts, group, submission, on_output, self.now_ns())
        engine_core.submit(list(zip(group, admission.sinks, strict=True)), admission.decide, submission)
        self._wake()
        self._undecided.append(admission)
        try:
            await admission.wait(setup.core.max_model_len)
        finally:
            self._undecided.remove(admission)
        return admission.handles

    async def _check_key(self, submission: Submission) -> None:
        """Raise if a reply has the idempotency key. A submission that was refused has not taken it."""
        while earlier := next((each for each in self._undecided if each.has_key_of(submission)), None):
            await earlier.decided()
        self.registry.check_key(submission)

    async def administer(self, action: AdminAction) -> EngineStatus:
        """Do what an operator asks and return the engine's status. Raises UnknownPolicyError, UnknownRequestError,
        AmbiguousRequestError, UnknownBackendError, UsageError for what backends cannot do, RestartError, or
        EngineUnavailableError.
        """
        engine_core = self._require_engine_core()
        self._check_alive()
        if self._is_stopping and isinstance(action, Drain | Resume):
            raise EngineUnavailableError("the engine is being stopped")
        if isinstance(action, BackendAction):
            return await self._administer_backends(action)
        if isinstance(action, Restart):
            await self.on_restart()
        flushed = carry_out(action, engine_core, self.registry, self._drain)
        # A drain that failed has ended the engine.
        self._check_alive()
        if isinstance(action, Drain | Resume):
            self.state = "draining" if isinstance(action, Drain) else "ready"
        self._drain()
        self._check_alive()
        if isinstance(action, Pause | Resume):
            self._tell_state()
        return status_of(self.state, engine_core.core.state, flushed=flushed, backends=self._list_backends() or UNSET)

    @property
    def _backend_sets(self) -> dict[str, BackendSet]:
        sets = self._backends.sets
        return {name: sets[number] for name, number in self._set_numbers.items() if number in sets}

    def _list_backends(self) -> list[BackendStatus]:
        return backend_actions.list_backends(self._backend_sets, self._require_engine_core().core.state)

    async def _administer_backends(self, action: BackendAction) -> EngineStatus:
        await backend_actions.carry_out(action, self._backend_sets)
        self._check_alive()
        # A backend that has just been added is up in the core after this.
        self._drain()
        self._check_alive()
        return status_of(self.state, self._require_engine_core().core.state, backends=self._list_backends())

    async def resume(
        self, reply_id: str, owner: str, on_output: OnOutput, limits: RateLimits = NO_LIMITS
    ) -> ResumedReply:
        """Read a reply again from its first output on; its present reader ends. Counts as a request.

        Raises UnknownReplyError, EngineUnavailableError before the engine has started, or RateLimitError.
        """
        self._require_engine_core()
        # Limits first: a client that is over one does not learn whether the reply exists.
        self._limiter.count(owner, limits, self.now_ns())
        return self.registry.resume(reply_id, owner, on_output)

    async def join(
        self, key: IdempotencyKey, owner: str, on_output: OnOutput, limits: RateLimits = NO_LIMITS
    ) -> ResumedReply:
        """Read the reply that has an idempotency key from its first output on, beside its other readers. Counts as a
        request.

        Raises UnknownReplyError, EngineUnavailableError before the engine has started, KeyReusedError, or
        RateLimitError.
        """
        self._require_engine_core()
        reply = self.registry.find_by_key(key, owner)
        self._limiter.count(owner, limits, self.now_ns())
        return self.registry.read_again(reply, on_output)

    def come_back(
        self, reply_id: str, on_output: OnOutput, num_had: int, front_end: int, *, is_edge: bool
    ) -> tuple[list[int], int]:
        """An edge or a reader in a front end goes on with a reply of a run that was recovered: it gets all outputs but
        the first `num_had`. Returns the seqs of its requests, and the reader's number. Raises UnknownReplyError.
        """
        self._check_alive()
        reply = self.registry.come_back(reply_id, on_output, num_had, front_end, is_edge=is_edge)
        return reply.requests, 0 if is_edge else reply.num_readers - 1

    def edges_have_left(self) -> None:
        """Edges of a run that was recovered do not come back any more: end what nobody can come back for."""
        if self._engine_core is not None:
            for request in self.registry.edges_have_left(self._engine_core.live.requests):
                self.cancel(request, BY_RECOVERY)
            self.on_orphans()

    def leave(self, reply_id: str, reader: int) -> None:
        """A reader of a resumable reply (0: its submitter) is gone. A reply without a reader ends after a while."""
        self.registry.leave(reply_id, reader)

    async def cancel_reply(self, reply_id: str, owner: str) -> bool:
        """End the requests of a reply and drop its kept outputs; returns whether any request was under way. Raises
        UnknownReplyError if there is neither, and EngineUnavailableError before the engine has started.
        """
        engine_core = self._require_engine_core()
        reply = self.registry.find(reply_id, owner)
        running = [request for request in reply.requests if request in engine_core.live]
        # A search may be between two requests.
        is_running = bool(running) or reply.is_open
        reply.close()
        for request in running:
            self.cancel(request, BY_OWNER)
        # At once, so that a second call gets the error.
        self._drain()
        if not self.registry.drop(reply) and not is_running:
            raise UnknownReplyError(f"the reply '{reply_id}' is over, and its outputs are no longer kept")
        dropped = asyncio.get_running_loop().create_future()
        engine_core.drop_reply(reply.submission.reply_id, lambda: dropped.set_result(None))
        await dropped
        return is_running

    async def status(self, reply_id: str, owner: str | None) -> ReplyStatus:
        """Where the sequences of a reply are; owner None: of any owner. Raises UnknownReplyError, and without an owner
        AmbiguousRequestError.
        """
        registry = self.registry
        reply = registry.find(reply_id, owner) if owner is not None else reply_named(reply_id, registry)
        state = self._engine_core.core.state if self._engine_core is not None else None
        return reply_status(reply, state, self._rows)

    async def explain(self, reply_id: str, owner: str) -> ExplainResponse:
        """Where the time of a reply went, up to the end of the trace. Raises UnknownReplyError, NotExplainedError."""
        reply = self.registry.find(reply_id, owner)
        return await self._explanations.explain(self.run_folder, reply.requests, owner=owner)

    async def list_oldest(self, limit: int) -> OldestRequests:
        """The oldest requests as they are now. Raises EngineUnavailableError before `start`."""
        return oldest_requests(self._require_engine_core().core.state, self.now_ns(), limit)

    async def report(self, seconds: int) -> bytes:
        """A page of HTML about the last part of the run. Raises NoReportError."""
        now_ns = self.now_ns()
        window = TimeWindow(max(now_ns - seconds * NANOSECONDS_PER_SECOND, 0), now_ns)
        return await self._reports.make(self.run_folder, window)

    def cancel(self, request: int, reason: str = CLIENT_LEFT) -> None:
        """End a request; nothing if it has ended."""
        engine_core = self._engine_core
        if engine_core is not None and request in engine_core.live:
            self.put_fact(Cancelled(c=request, request=request, reason=reason))

    def lose_front_end(self, front_end: int) -> None:
        """End all requests of a front end that has gone, and its holds. With `--recover`, those of resumable replies go
        on.
        """
        self.object_store.end_holds(front_end)
        engine_core = self._engine_core
        if engine_core is None:
            return
        if not self.setup.config.record.recover:
            self.put_fact(FrontEndLost(front_end=front_end))
            return
        # Those that have just arrived get their replies.
        self._drain()
        going_on = self.registry.edges_have_died(front_end)
        for seq, request in engine_core.core.state.requests.items():
            if request.arrival.scheduling.front_end == front_end and seq not in going_on:
                self.cancel(seq)
        self.on_orphans()

    def put_fact(self, fact: Fact) -> None:
        """Queue a fact for the next tick."""
        self._require_engine_core().put_fact(fact)
        self._wake()
        if isinstance(fact, WorkerUp | WorkerLost):
            self._tell_state()

    def complete(self, replica: int, result: StepResult) -> None:
        """Queue a step's completion. Its times are on this machine's monotonic clock.

        Raises ResultMismatchError if it does not answer what was launched.
        """
        self._require_engine_core().complete(
            replica,
            result,
            start_ns=self._on_run_axis(result.start_ns),
            end_ns=self._on_run_axis(result.end_ns),
            stages=[(self._on_run_axis(start_ns), self._on_run_axis(end_ns)) for start_ns, end_ns in result.stages],
        )
        self._wake()

    def answer_went_on(self, name: AttemptId, delta: AnswerDelta) -> None:
        """As BackendOwner.answer_went_on; nothing once the engine has stopped, here and below."""
        if self._engine_core is not None:
            self._engine_core.answer_went_on(name, delta)
            self._wake()

    def answer_ended(self, name: AttemptId, ended: AnswerEnd) -> None:
        """As BackendOwner.answer_ended."""
        if self._engine_core is not None:
            self._engine_core.answer_ended(name, ended)
            self._wake()

    def attempt_failed(self, name: AttemptId, error: BackendError) -> None:
        """As BackendOwner.attempt_failed."""
        if self._engine_core is not None:
            self._engine_core.attempt_failed(name, error, can_continue=self._backends.can_continue(name))
            self._wake()

    def backends_changed(self) -> None:
        """As BackendOwner.backends_changed."""
        self._tell_state()
        for number in self._backends.sets:
            self._outages.note(number, self.setups[number].config.gateway.outage_seconds)

    def _end_waiting(self, number: int, requests: list[int]) -> None:
        """No backend of a set has been up for too long: end what waits for one."""
        model = self.setups[number].core.models[0]
        error = EngineUnavailableError(f"no backend of the model {model!r} is up")
        engine_core = self._require_engine_core()
        for request in requests:
            engine_core.live.fail_request(request, error)
            self.cancel(request, AT_SHUTDOWN)
        log.error("requests have waited too long for a backend", model=model, requests=len(requests))

    def _on_run_axis(self, time_ns: int) -> int:
        return max(time_ns - self.origin_ns, 0)

    async def stop(self, reason: str = "stop") -> None:
        """End what still runs, close the log, stop the workers. Harmless when called twice."""
        self._is_stopping = True
        if self.state == "loading":
            self.state = "dead"
        elif self.state in ("ready", "draining"):
            self.state = "draining"
            # First decide on those that have just arrived, so that they can be cancelled like all others.
            self._drain()
            for request in list(self._require_engine_core().core.state.requests):
                self.cancel(request, AT_SHUTDOWN)
            self._drain()
        await self._replicas.stop()
        await self._backends.stop()
        await self.object_store.close()
        engine_core, self._engine_core = self._engine_core, None
        if engine_core is None:
            return
        self.state = "dead"
        try:
            if self._broken:
                engine_core.close()
            else:
                engine_core.end(reason)
        finally:
            if self._span_exporter is not None:
                await self._span_exporter.stop()

    def hand_over(self) -> None:
        """Close the log as it is: another process goes on with the run. This one must end at once."""
        self._drain()
        self._require_engine_core().hand_over()

    def end_text(self, request: int, index: int, position: int, reason: str) -> None:
        """Queue what an edge has found in a text; nothing if the request has ended."""
        if self._engine_core is not None:
            self._engine_core.end_text(request, index, position, reason)
            self._wake()

    def _grammar_ready(self, request: int, error: GrammarError | None) -> None:
        if self._engine_core is not None:
            self._engine_core.grammar_ready(request, error)
            self._wake()

    def _while_alive(self, delay_seconds: float, action: Callable[[], None]) -> None:
        assert self._loop is not None

        def act() -> None:
            if self.state != "dead":
                action()

        self._loop.call_later(delay_seconds, act)

    def _wake(self) -> None:
        """One drain per tick, however many facts arrive in it."""
        if not self._drain_scheduled and self._loop is not None:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        engine_core = self._engine_core
        if engine_core is None or self.state == "dead":
            return
        self._guarded(lambda: engine_core.drain(self.now_ns()))

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run a call of the engine core. If it fails, the state is unknown, so the engine dies."""
        try:
            action()
        except EventLMError as error:
            self._broken = True
            self._die(str(error))
            log.error("the engine cannot go on", error=str(error))
        except Exception as error:
            self._broken = True
            # All waiting clients get this message, and the error's own text may hold one client's data.
            self._die(f"a defect in it, {type(error).__name__}")
            log.exception("the engine cannot go on: this is a defect, please report it")

    def _cancel_broken(self, requests: list[int], error: Exception) -> None:
        """A callback of these requests raised. Their outputs are dropped; all others go on."""
        log.error(
            "outputs could not be delivered: this is a defect, please report it", requests=requests, exc_info=error
        )
        for request in requests:
            self.cancel(request, OUTPUT_FAILED)

    def _replica_dead(self, number: int, reason: str) -> None:
        """A replica was given up. The others go on; without any its replicaset is unavailable, and without any of all
        sets the engine is dead.
        """
        num_live = self._replicas.num_live
        if not num_live[number]:
            # The loss itself belongs in the log.
            self._drain()
            if any(num_live):
                self._lose_set(number, reason)
            else:
                self._die(f"no worker is left: {reason}")
        log.error("replica given up", reason=reason, left=sum(num_live))

    def _lose_set(self, number: int, reason: str) -> None:
        """End the clients of a replicaset with an error."""
        model = self.setups[number].core.models[0]
        error = EngineUnavailableError(f"no worker of the model {model!r} is left: {reason}")
        if self._engine_core is not None:
            for request in self._engine_core.live.fail_set(number, error):
                self.cancel(request, AT_SHUTDOWN)
        log.error("no worker of a model is left", model=model, reason=reason)
        self._tell_state()

    def _die(self, reason: str) -> None:
        """End all waiting clients with an error."""
        self.state = "dead"
        error = self._death = EngineUnavailableError(f"the engine has died: {reason}")
        for admission in self._undecided:
            admission.fail(error)
        if self._engine_core is not None:
            self._engine_core.fail(error)

    def _check_alive(self) -> None:
        if self.state == "dead":
            raise self._death or EngineUnavailableError("the engine is dead")

    def _require_engine_core(self) -> EngineCore:
        if self._engine_core is None:
            raise EngineUnavailableError("the engine is not running")
        return self._engine_core


async def _cannot_restart() -> None:
    raise RestartError("nothing would start the next engine; start the server with --recover")
