"""What is drawn from a seed: the server, its clients, and what happens to them and when.

Each fault and each visit is drawn by its own number, so that leaving some out does not change the others. One seed in
ten has no faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import structs

from eventlm.config import (
    CacheConfig,
    Config,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    RecordConfig,
    SchedulerConfig,
    ServerConfig,
    WorkerConfig,
)
from tests.serving import fake_text
from tests.world.machine.draws import MILLION, Draws
from tests.world.machine.process import Death
from tests.world.machine.world import SECOND
from tests.world.plans.faults import FAULTS, POLICIES, FaultKind
from tests.world.plans.gateway_faults import GATEWAY_FAULTS
from tests.world.plans.gateway_plan import GatewayPlan, draw_body, draw_gateway, draw_gateway_config
from tests.world.plans.keys_plan import KeysPlan, SentKey, draw_keys

#: So many restarts that the server never gives up a replica.
MANY_RESTARTS = 1000
#: Numbers of ranks to draw from; most replicas have one.
_RANKS = (1, 1, 1, 1, 1, 1, 2, 3)
_ROUTERS = ("pull", "round_robin", "least_loaded", "prefix_affinity")
#: How servers die.
_DEATHS = ("kill server", "kill server", "kill server in a call", "kill server in a call", "reboot")
#: Half of the faults happen within this time after a client has come.
_NEAR_NS = 3 * SECOND
#: The least and most time between two probes of a backend, unless the pace says otherwise.
_PROBE_MS = (100, 5_000)
#: The most tokens of a text and of a prompt.
_MOST_OUTPUT, _MOST_PROMPT = 120, 200


class Fault(NamedTuple):
    """A fault of a plan. detail: a drawn number, from which the kind of fault takes its details."""

    number: int
    at_ns: int
    kind: str
    detail: int


class Visit(NamedTuple):
    """A client that comes with a request. key: None: the server requires no keys. Each `after` is a number of events of
    a reply; -1: never.

    leaves_after: when the client leaves. num_tries: how often it retries if it is not served, and how often it
    reconnects for the rest of its stream. breaks_after: when each of its connections breaks. pauses_after, pause_ms:
    when, and for how long, it stops reading on each connection. deletes_after: when it ends its reply. patience_us:
    it leaves after this time, whatever has arrived; -1: it does not. idempotency_key: with one, the client sends its
    request again instead of reconnecting.
    """

    number: int
    at_ns: int
    body: dict[str, Any]
    path: str
    leaves_after: int = -1
    num_tries: int = 0
    breaks_after: int = -1
    pauses_after: int = -1
    pause_ms: int = 0
    deletes_after: int = -1
    patience_us: int = -1
    idempotency_key: str = ""
    key: SentKey | None = None


_LAST_VISIT = Visit(
    -1,
    0,
    {"model": "m", "seed": 7, "max_tokens": 3, "n": 2, "stream": True, "prompt": "last"},
    "/v1/completions",
    -1,
)


class Plan(NamedTuple):
    """The plan of a seed. is_calm: nothing goes wrong except that clients leave. seconds: from the start of the server
    to the last visit or fault. deaths: which processes to kill, by name.
    """

    seed: int
    is_calm: bool
    config: Config
    num_blocks: int
    seconds: int
    visits: list[Visit]
    faults: list[Fault]
    deaths: Mapping[str, Death] = {}
    gateway: GatewayPlan | None = None
    keys: KeysPlan | None = None

    @property
    def last_visit(self) -> Visit:
        """The visit that comes once all is well."""
        if self.keys is None:
            return _LAST_VISIT
        return _LAST_VISIT._replace(key=self.keys.operator.sent)

    def without(self, visits: set[int], faults: set[int]) -> Plan:
        """A copy of the plan without some of its visits and faults."""
        return self._replace(
            visits=[each for each in self.visits if each.number not in visits],
            faults=[each for each in self.faults if each.number not in faults],
        )


class Patience(NamedTuple):
    """The least and most of the timeouts. silence, step, start: of workers, in seconds; the longer the silence, the
    rarer the heartbeats. probe_ms: time between two probes of a backend.
    """

    silence: tuple[int, int] = (2, 60)
    step: tuple[int, int] = (5, 60)
    start: tuple[int, int] = (5, 120)
    probe_ms: tuple[int, int] = _PROBE_MS


class Pace(NamedTuple):
    """How much happens, and for how long, in place of what the seed draws. most_output: tokens of the longest texts."""

    hours: int
    visits_per_hour: int
    faults_per_hour: int
    patience: Patience
    most_output: int = _MOST_OUTPUT


PACES = {
    "quiet": Pace(4, 5, 18, Patience((600, 700), (600, 700), (300, 600), (60_000, 300_000)), most_output=40),
    "steady": Pace(1, 1800, 0, Patience(probe_ms=(1_000, 10_000))),
}


def draw_plan(seed: int, pace: Pace | None = None) -> Plan:
    """Draw the plan of a seed, at another pace if one is given. In one seed of four, other servers run the model."""
    draws = Draws(seed)
    return draw_gateway_plan(seed, pace) if draws.draw("gateway") % 4 == 0 else _with_copies(_draw_own(draws, pace))


def draw_gateway_plan(seed: int, pace: Pace | None = None) -> Plan:
    """Draw a plan of the same kind, in which other servers always run the model."""
    draws = Draws(seed)
    plan = _draw_own(draws, pace)
    gateway = draw_gateway(draws, is_calm=plan.is_calm)
    probe_ms = draws.between(*_patience(pace).probe_ms, "gateway probe")
    plan = plan._replace(
        config=draw_gateway_config(draws, gateway, plan.config, probe_ms),
        visits=[each._replace(body=draw_body(draws, each.number, each.body)) for each in plan.visits],
        faults=[_of_gateway(draws, each) for each in plan.faults],
        gateway=gateway,
    )
    return _with_copies(plan)


def draw_recovering_plan(seed: int, pace: Pace | None = None) -> Plan:
    """Draw a plan of the same kind, in which each server goes on where the one before has died."""
    draws = Draws(seed)
    plan = _draw_own(draws, pace, recovers=True)
    return _with_copies(plan._replace(faults=[_of_server(draws, each) for each in plan.faults]))


def _of_server(draws: Draws, fault: Fault) -> Fault:
    """Replace half of the faults by deaths of the server."""
    place = draws.draw("fault of server", fault.number)
    return fault._replace(kind=_DEATHS[place // 2 % len(_DEATHS)]) if place % 2 else fault


def _recovering(draws: Draws, config: Config) -> Config:
    """A server that goes on where another one has died. It waits for its log, and handles requests itself."""
    recover = ("memory", "/spool")[draws.draw("spool") % 2]
    return structs.replace(
        config,
        server=structs.replace(config.server, api_servers=0),
        record=structs.replace(config.record, record_lag="wait", recover=recover),
    )


def _with_copies(plan: Plan) -> Plan:
    """Have one client in six come with a request of another one that has an idempotency key, at about the same time."""
    draws, with_key = Draws(plan.seed), [each for each in plan.visits if each.idempotency_key]

    def copy(visit: Visit) -> Visit:
        if not with_key or draws.draw("is a copy", visit.number) % 6:
            return visit
        first = with_key[draws.draw("copy of", visit.number) % len(with_key)]
        late_ms = draws.between(0, (5, 20_000)[draws.draw("copy is late", visit.number) % 2], "copy time", visit.number)
        return visit._replace(
            at_ns=min(first.at_ns + late_ms * SECOND // 1000, plan.seconds * SECOND - 1),
            body=first.body,
            path=first.path,
            key=first.key,
            idempotency_key=first.idempotency_key,
        )

    return plan._replace(visits=[copy(each) for each in plan.visits])


def _patience(pace: Pace | None) -> Patience:
    return Patience() if pace is None else pace.patience


def _draw_own(draws: Draws, pace: Pace | None, *, recovers: bool = False) -> Plan:
    is_calm = draws.draw("calm") % 10 == 0
    seconds = draws.between(20, 600, "seconds")
    num_visits = draws.between(1, 40, "visits")
    num_faults = 0 if is_calm else draws.between(1, 12, "faults")
    if pace is not None:
        is_calm = not pace.faults_per_hour
        seconds = pace.hours * 3600
        num_visits, num_faults = pace.hours * pace.visits_per_hour, pace.hours * pace.faults_per_hour
    most_output = _MOST_OUTPUT if pace is None else pace.most_output
    visits = [_draw_visit(draws, number, seconds, most_output) for number in range(num_visits)]
    config = _draw_config(draws, is_calm=is_calm, patience=_patience(pace))
    if recovers or (not config.server.api_servers and draws.draw("recovers") % 2):
        config = _recovering(draws, config)
    # Over hours, the key file would have to be checked all the time.
    keys = draw_keys(draws) if pace is None else None
    if keys is not None:
        config = keys.put_into(config)
        visits = [each._replace(key=keys.sent(draws, each.number)) for each in visits]
    return Plan(
        seed=draws.seed,
        is_calm=is_calm,
        config=config,
        num_blocks=draws.between(24, 96, "blocks"),
        seconds=seconds,
        visits=visits,
        faults=[_draw_fault(draws, number, seconds, visits) for number in range(num_faults)],
        keys=keys,
    )


def _draw_config(draws: Draws, *, is_calm: bool, patience: Patience) -> Config:
    """Draw the server's flags, and some constants of the shell."""
    fake: dict[str, Any] = {"base_ns": draws.between(500_000, 40_000_000, "base")}
    if not is_calm:
        fake["late_ppm"] = draws.between(0, 20_000, "late")
        fake["die_ppm"] = draws.between(0, 3, "dies") // 3 * 500
        fake["hang_ppm"] = draws.between(0, 5, "hangs") // 5 * 300
        fake["raise_ppm"] = draws.between(0, 5, "raises") // 5 * 300
        fake["poison_ppm"] = draws.between(0, 7, "poison") // 7 * 20_000
    policy = POLICIES[draws.draw("policy") % len(POLICIES)]

    def draw_limit(least: int, most: int, what: str, *, usual: int) -> int:
        """Draw a limit. One seed in four has a low one, except in calm plans, where clients must not run into it."""
        return usual if is_calm or draws.draw(f"low {what}") % 4 else draws.between(least, most, what)

    return Config(
        model=ModelConfig(model="fake", fake=fake),
        scheduler=SchedulerConfig(
            replicas=draws.between(1, 3, "replicas"),
            policy={"type": policy},
            extra_policy=[each for each in POLICIES if each != policy],
            router={"type": _ROUTERS[draws.draw("router") % len(_ROUTERS)]},
            max_num_seqs=draws.between(1, 8, "seqs"),
            max_num_batched_tokens=draws.between(16, 256, "batched"),
            max_queue_len=draw_limit(2, 40, "queue", usual=2048),
            max_steps_in_flight=draws.between(1, 4, "steps in flight"),
            max_decodes_in_flight_per_seq=draws.between(0, 1, "decodes in flight"),
            run_ahead_ms=draws.between(0, 200, "run ahead"),
            max_skips=draws.between(0, 8, "skips"),
            max_evictions=draws.between(0, 3, "evictions"),
        ),
        cache=CacheConfig(
            block_size=(16, 32)[draws.draw("block size") % 2],
            prefix_cache=draws.draw("prefix cache") % 4 > 0,
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=_RANKS[draws.draw("tensor") % len(_RANKS)],
            pipeline_parallel_size=_RANKS[draws.draw("pipeline") % len(_RANKS)],
        ),
        worker=WorkerConfig(
            heartbeat_timeout_seconds=draws.between(*patience.silence, "heartbeat"),
            step_timeout_seconds=draws.between(*patience.step, "step timeout"),
            start_timeout_seconds=draws.between(*patience.start, "start timeout"),
            max_restarts=_draw_restarts(draws, fake),
        ),
        server=ServerConfig(
            api_servers=draws.between(0, 3, "front ends"),
            drain_seconds=draws.between(1, 60, "drain"),
            resume_seconds=draws.between(0, 1, "resumes") * draws.between(1, 120, "resume"),
            max_stream_buffer=f"{draws.between(1, 64, 'stream buffer')}KiB",
            write_timeout_seconds=draws.between(2, 60, "write timeout"),
            header_timeout_seconds=draws.between(1, 20, "header timeout"),
            body_timeout_seconds=draws.between(1, 60, "body timeout"),
            max_connections=draw_limit(4, 20, "connections", usual=4096),
            body_memory=f"{draw_limit(2, 8, 'bodies', usual=1024)}KiB",
        ),
        record=RecordConfig(
            record="/runs",
            record_segment=f"{draws.between(8, 200, 'segment')}KiB",
            record_keep=f"{draws.between(200, 2000, 'keep')}KiB",
            record_lag=("wait", "gap")[draws.draw("lag") % 2],
            record_lag_ms=draws.between(20, 2000, "lag time"),
            record_lag_memory=f"{draws.between(16, 4096, 'lag memory')}KiB",
            record_sync=("none", "interval", "group")[draws.draw("sync") % 3],
            record_sync_ms=draws.between(10, 5000, "sync time"),
            checkpoint_events=draws.between(10, 1000, "checkpoint"),
            validate_every=draws.between(1, 64, "validate"),
        ),
        log=LogConfig(log_stats_interval_s=draws.between(0, 60, "stats")),
    )


def _draw_restarts(draws: Draws, fake: Mapping[str, Any]) -> int:
    """The budget of restarts. It is small only if workers fail through faults alone, so that the server recovers in the
    end.
    """
    fails = any(fake.get(f"{name}_ppm") for name in ("die", "hang", "raise", "poison"))
    return MANY_RESTARTS if fails or draws.draw("few restarts") % 2 else draws.between(0, 5, "restarts")


def _draw_visit(draws: Draws, number: int, seconds: int, most_output: int) -> Visit:
    def between(least: int, most: int, what: str) -> int:
        return draws.between(least, most, f"visit {what}", number)

    is_chat = draws.draw("chat", number) % 2 == 0
    prompt = "p" * between(1, _MOST_PROMPT, "prompt")
    shared = f"family {between(0, 4, 'family')} " * between(0, 6, "shared")
    most = between(1, most_output, "output")
    body: dict[str, Any] = {
        "model": "m",
        "seed": between(0, 2**31, "seed"),
        "max_completion_tokens" if is_chat else "max_tokens": most,
        "n": between(1, 4, "n") // 4 + 1,
        "stream": draws.draw("stream", number) % 4 > 0,
    }
    if draws.draw("deadline", number) % 3 == 0:
        body["deadline_ms"] = between(10, 20_000, "deadline")
        if draws.draw("drop", number) % 2 == 0:
            body["drop_if_late"] = True
    if draws.draw("stop", number) % 4 == 0:
        text = fake_text(body["seed"], most)
        start = between(0, most - 1, "stop start")
        body["stop"] = text[start : start + between(1, 4, "stop length")].rstrip("\N{REPLACEMENT CHARACTER}") or "none"
    if is_chat:
        body["messages"] = [{"role": "user", "content": shared + prompt}]
    else:
        body["prompt"] = shared + prompt
    once = f"once-{draws.draw('idempotency key', number):016x}"
    return Visit(
        number,
        between(0, seconds * SECOND, "time"),
        body,
        "/v1/chat/completions" if is_chat else "/v1/completions",
        idempotency_key=once if draws.draw("once", number) % 4 == 0 else "",
        **_draw_manners(draws, number),
    )


def _draw_manners(draws: Draws, number: int) -> dict[str, int]:
    """Draw what a client does besides reading its reply."""

    def after(one_of: int, most: int, what: str) -> int:
        """After how many events it does this; -1: never. One client in `one_of` does it."""
        place = draws.draw(what, number)
        return place // one_of % (most + 1) if place % one_of == 0 else -1

    return {
        "leaves_after": after(8, 20, "leaves"),
        "num_tries": draws.between(0, 4, "tries", number),
        "breaks_after": after(4, 40, "breaks"),
        "pauses_after": after(8, 30, "pauses"),
        "pause_ms": draws.between(1, 30_000, "pause of visit", number),
        "deletes_after": after(12, 30, "deletes"),
        # From before the request has arrived to after most replies have ended.
        "patience_us": 2 ** draws.between(8, 20, "patience", number) if draws.draw("hurries", number) % 10 == 0 else -1,
    }


def _draw_fault(draws: Draws, number: int, seconds: int, visits: list[Visit]) -> Fault:
    kind = _drawn_kind(FAULTS, draws.draw("fault", number))
    at_ns = draws.draw("fault time", number) % (seconds * SECOND)
    if draws.draw("fault near", number) % 2 == 0 and visits:
        at_ns = min(visits[at_ns % len(visits)].at_ns + at_ns % _NEAR_NS, seconds * SECOND - 1)
    return Fault(number, at_ns, kind, draws.draw("fault detail", number) % MILLION)


def _of_gateway(draws: Draws, fault: Fault) -> Fault:
    """Replace two of three faults by faults of backends."""
    if draws.draw("fault of gateway", fault.number) % 3 == 0:
        return fault
    return fault._replace(kind=_drawn_kind(GATEWAY_FAULTS, draws.draw("gateway fault", fault.number)))


def _drawn_kind(kinds: Mapping[str, FaultKind], draw: int) -> str:
    place = draw % sum(fault.weight for fault in kinds.values())
    for kind, fault in kinds.items():
        if place < fault.weight:
            return kind
        place -= fault.weight
    raise AssertionError("weights do not add up")
