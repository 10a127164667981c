"""Random workloads: what is drawn from a seed, and what must come of it.

A workload is a seed. Its machine (pool, limits, depth, replicas, plug-ins) and its life (arrivals in groups, cancels,
late text ends, grammars, dying workers, pauses, swaps) are drawn from it, so a run is (seed, commit). The tokens that
each sequence must end with do not depend on any of that: `is_expected` knows them from the request alone.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from msgspec import UNSET, structs

from eventlm.config import CoreConfig
from eventlm.config.core import Forwarding
from eventlm.core.core import Core
from eventlm.core.graph_buckets import default_buckets
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.core.state.replicaset import Plugins, SetParts
from eventlm.engine.backend import ForwardedRequest
from eventlm.engine.plugins.registry import resolve
from eventlm.engine.request import Request
from eventlm.events import Header, PluginRecord
from eventlm.events.markers import ReplicasetRecord
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.worker.fake.states import fold
from eventlm.worker.fake.tokens import (
    ENDS,
    EOS_TOKEN_ID,
    MILLION,
    FakeParameters,
    draw,
    fake_token,
    poisoned_place,
    state_token,
)
from tests.virtual_backend import BackendTraits, answer_length, answer_tokens

POLICIES = ("fcfs", "edf", "lrs", "lpm")
BATCHERS = ("fixed", "dynamic", "space_sharing")
ROUTERS = ("round_robin", "pull", "least_loaded", "prefix_affinity", "session_affinity")
MILLISECOND = 1_000_000
#: Close to the default, but that a step of two rows and more is predicted to take two milliseconds.
COEFFICIENTS = (1_800_000_000, *DEFAULT_COEFFICIENTS[1:])
#: Behind any step, behind none, and behind those of one row.
RUN_AHEAD_MS = (0, 1, 2)
#: None, fewer than there may be decodes, and for any number of them.
GRAPH_BUCKETS: tuple[list[int], ...] = ([], [2], default_buckets(64))
#: Ends that cut a sequence short.
SERVICE_CLASSES = ("", "gold", "", "silver")
CUT_SHORT = ("cancelled", "deadline", "front_end_lost", "error")


class Machine(NamedTuple):
    """What a workload runs on."""

    core: CoreConfig
    policies: list[dict[str, Any]]
    batcher: dict[str, Any]
    router: dict[str, Any]
    fake: FakeParameters
    #: Of the other servers that its replicas are, if `core.forwards` is set.
    backends: BackendTraits = BackendTraits()
    #: The further replicasets of an engine that has several.
    others: tuple[Machine, ...] = ()

    @property
    def sets(self) -> tuple[Machine, ...]:
        """All replicasets in their order."""
        return (self, *self.others)


class Outcome(NamedTuple):
    """How a sequence ended."""

    reason: str
    tokens: tuple[int, ...]


class Chaos(NamedTuple):
    """Chances of what goes wrong, each per request or per workload."""

    cancels: float = 0.1
    kills: int = 2
    drops_if_late: float = 0.2
    unseeded: float = 0.2
    grammars: float = 0.1
    #: Chance that a grammar cannot be built.
    bad_grammars: float = 0.2
    text_ends: float = 0.4
    max_text_delay_ns: int = 5 * 4 * MILLISECOND
    #: How often the engine dies, and another one goes on with the run.
    recoveries: int = 0
    #: Chance of a sequence that kills every worker, in parts per million.
    poison_ppm: int = 8_000


def draw_machine(rng: random.Random, seed: int) -> Machine:
    """A small machine. Every policy x batcher x router comes up in 48 consecutive seeds; one in seven has recurrent
    layers, one in five is a pipeline, one in six has KV groups.
    """
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = rng.choice([9, 14, 24, 60, 200])
    core = CoreConfig(
        models=["fake"],
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=(num_blocks - 1) * block_size,
        num_replicas=rng.choice([1, 1, 2, 3]),
        max_num_seqs=rng.choice([1, 2, 4, 8, 32]),
        max_num_batched_tokens=rng.choice([4, 8, 16, 64]),
        max_queue_len=rng.choice([4, 20, 1000]),
        max_steps_in_flight=rng.choice([1, 2, 3, 4]),
        max_decodes_in_flight_per_seq=rng.choice([1, 2, 3]),
        run_ahead_ms=RUN_AHEAD_MS[seed // 5 % len(RUN_AHEAD_MS)],
        max_tokens_per_row=rng.choice([1, 1, 2, 4]),
        graph_buckets=GRAPH_BUCKETS[seed // 7 % len(GRAPH_BUCKETS)],
        max_skips=rng.choice([0, 1, 4]),
        max_evictions=rng.choice([0, 1, 2]),
        max_losses=rng.choice([3, 4, 5]),
    )
    return _with_plugins(rng, seed, core)


def draw_large_machine(rng: random.Random, seed: int) -> Machine:
    """A larger one: more blocks, longer lines, up to 4 replicas."""
    block_size = rng.choice([2, 8, 16])
    num_blocks = rng.choice([60, 200, 1000])
    core = CoreConfig(
        models=["fake"],
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=min((num_blocks - 1) * block_size, 2000),
        num_replicas=rng.choice([1, 2, 4]),
        max_num_seqs=rng.choice([4, 16, 64]),
        max_num_batched_tokens=rng.choice([16, 64, 256]),
        max_queue_len=rng.choice([20, 1000]),
        max_steps_in_flight=rng.choice([1, 2, 4]),
        max_decodes_in_flight_per_seq=rng.choice([1, 2, 3]),
        run_ahead_ms=RUN_AHEAD_MS[seed // 5 % len(RUN_AHEAD_MS)],
        max_tokens_per_row=rng.choice([1, 1, 2, 4]),
        graph_buckets=GRAPH_BUCKETS[seed // 7 % len(GRAPH_BUCKETS)],
        max_skips=rng.choice([0, 4, 8]),
        max_evictions=rng.choice([0, 2, 3]),
        max_losses=rng.choice([3, 4, 5]),
    )
    return _with_plugins(rng, seed, core)


def _with_plugins(rng: random.Random, seed: int, core: CoreConfig) -> Machine:
    """A machine with layers, stages and groups by its seed."""
    machine = _plain(rng, seed, core)
    if seed % 5 == 2:
        machine = with_stages(machine, seed)
    if seed % 7 == 3:
        return with_states(machine, seed)
    return with_groups(machine, seed) if seed % 6 == 1 else machine


def _plain(rng: random.Random, seed: int, core: CoreConfig) -> Machine:
    policies = [
        {"type": "fcfs"},
        {"type": "edf", "evict_margin_ms": rng.choice([0, 5, 10_000]), "min_deadline_ms": rng.choice([1, 50])},
        {"type": "lrs", "evict_margin": rng.choice([0, 0.5, 8]), "min_deadline_ms": rng.choice([1, 50])},
        {"type": "lpm", "ageing_tokens_per_s": rng.choice([1, 250, 10_000])},
    ]
    first = seed % 4
    policies = policies[first:] + policies[:first]
    batcher: dict[str, Any] = {"type": BATCHERS[seed // 4 % 3]}
    if batcher["type"] != "fixed":
        batcher |= {"target_ms": rng.choice([1, 4, 20]), "min_chunk_tokens": rng.choice([1, 4])}
    if batcher["type"] == "space_sharing":
        batcher |= {"min_long_steps": rng.choice([0, 1, 3]), "max_share": rng.choice([0.5, 0.9])}
    fake = FakeParameters(
        end_ppm=rng.choice([0, 30_000, 200_000]),
        late_ppm=rng.choice([0, 50_000]),
        die_ppm=rng.choice([0, 0, 4_000]),
    )
    return Machine(core, policies, batcher, {"type": ROUTERS[seed // 12 % len(ROUTERS)]}, fake)


def with_groups(machine: Machine, seed: int) -> Machine:
    """The same with several KV groups."""
    core, rng = machine.core, random.Random(seed)
    core = structs.replace(
        core,
        num_kv_groups=rng.choice([2, 3]),
        kv_shard_tokens=core.block_size * rng.choice([1, 2, 4]),
        max_tokens_per_row=1,
    )
    return machine._replace(core=core)


def with_stages(machine: Machine, seed: int) -> Machine:
    """The same as a pipeline."""
    rng = random.Random(seed)
    num_stages = rng.choice([2, 3, 4])
    micro_batches = rng.choice([UNSET, 1, 2, num_stages + 1])
    core = structs.replace(machine.core, num_stages=num_stages, micro_batches=micro_batches)
    return machine._replace(core=core)


def with_states(machine: Machine, seed: int) -> Machine:
    """The same with recurrent layers, and few slots for copies of their states."""
    core, rng = machine.core, random.Random(seed)
    core = structs.replace(
        core,
        max_num_batched_tokens=max(core.max_num_batched_tokens, core.block_size),
        max_tokens_per_row=1,
        state_slots=core.max_residents + rng.choice([1, 2, 5, 40]),
        state_interval=rng.choice([UNSET, core.block_size, 3 * core.block_size]),
    )
    return machine._replace(core=core, fake=structs.replace(machine.fake, recurrent=True))


def with_sets(machine: Machine, seed: int) -> Machine:
    """The same with one or two further replicasets, which have nothing in common with the first."""
    rng = random.Random(f"{seed}/sets")
    others = []
    for number in range(1, rng.choice([2, 3])):
        other = draw_machine(rng, rng.randrange(1000))
        others.append(other._replace(core=structs.replace(other.core, models=[f"fake {number}"])))
    return machine._replace(others=tuple(others))


def draw_backends(rng: random.Random, seed: int) -> Machine:
    """A machine whose replicas are other servers."""
    block_size = rng.choice([2, 4, 16])
    num_blocks = rng.choice([14, 60, 200])
    slots = rng.choice([1, 2, 4])
    forwards = Forwarding(
        max_attempts=rng.choice([1, 2, 4]),
        backoff_ns=rng.choice([1, 5, 40]) * MILLISECOND,
        retry_share_ppm=rng.choice([0, 200_000, 2_000_000]),
        hedge_ns=rng.choice([0, 2, 150]) * MILLISECOND,
        first_limit=rng.choice([1, 3, 8]),
    )
    core = CoreConfig(
        models=["backends"],
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=(num_blocks - 1) * block_size,
        num_replicas=rng.choice([1, 2, 3, 4]),
        max_num_seqs=rng.choice([4, 16]),
        max_queue_len=rng.choice([4, 20, 1000]),
        forwards=forwards,
    )
    traits = BackendTraits(
        slots=slots,
        tells_limit=rng.random() < 0.5,
        tells_load=rng.random() < 0.4,
        continues=rng.random() < 0.5,
        fails=rng.choice([0, 0.1, 0.3]),
    )
    return _plain(rng, seed, core)._replace(backends=traits)


def make_core(machine: Machine) -> tuple[Header, Core]:
    """The header of a run on this machine, and a core as it describes."""
    (records, parts), *others = [_make_set(each) for each in machine.sets]
    header = Header(
        run="simulation",
        unix_start_ns="0",
        code_version="0",
        core=machine.core,
        plugins=records,
        predictor=list(COEFFICIENTS),
    )
    if others:
        header = structs.replace(
            header,
            replicaset=machine.core.models[0],
            replicasets=[
                ReplicasetRecord(
                    name=other.config.models[0], core=other.config, plugins=of_other, predictor=list(COEFFICIENTS)
                )
                for of_other, other in others
            ],
        )
    return header, Core(*parts, [other for _, other in others])


def _make_set(machine: Machine) -> tuple[list[PluginRecord], SetParts]:
    policies = [resolve("policy", spec) for spec in machine.policies]
    batcher, router = resolve("batcher", machine.batcher), resolve("router", machine.router)
    plugins = Plugins(
        policies={policy.record.name: policy.instance for policy in policies},
        policy=policies[0].record.name,
        batcher=batcher.instance,
        router=router.instance,
    )
    records = [*(policy.record for policy in policies), batcher.record, router.record]
    return records, SetParts(machine.core, plugins, Predictor.from_coefficients(COEFFICIENTS))


def draw_request(rng: random.Random, machine: Machine, chaos: Chaos) -> Request:
    """A request that fits the context; some share prefixes."""
    context = machine.core.max_model_len
    prompt_tokens = rng.randint(1, max(1, min(context - 1, rng.choice([6, 20, context - 1]))))
    shared_tokens = rng.choice([0, prompt_tokens, rng.randint(0, prompt_tokens)])
    prompt = [7] * shared_tokens + [rng.randrange(256) for _ in range(prompt_tokens - shared_tokens)]
    kind: Any = rng.choice(["generate"] * 8 + ["score", "pool"])
    is_forwarded = machine.core.forwards is not UNSET
    if is_forwarded and kind == "score":
        kind = "pool"
    return Request(
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=rng.randint(1, max(1, min(context - prompt_tokens, 24))),
            n=rng.choice([1, 1, 1, 2, 3]) if kind == "generate" else 1,
            seed=None if rng.random() < chaos.unseeded else rng.getrandbits(64),
        ),
        scheduling=SchedulingParams(
            model=machine.core.models[0],
            kind=kind,
            skip_cache_read=rng.random() < 0.1,
            waits_for_grammar=rng.random() < chaos.grammars and kind == "generate" and not is_forwarded,
            priority=rng.choice([0, 0, 0, -1, 3]),
            deadline_ns=rng.choice([0, 0, 5, 200]) * MILLISECOND,
            # No policy reads it, so it follows from what is drawn anyway.
            service_class=SERVICE_CLASSES[prompt_tokens % len(SERVICE_CLASSES)],
            drop_if_late=rng.random() < chaos.drops_if_late,
            has_text_ends=rng.random() < chaos.text_ends and kind == "generate" and not is_forwarded,
            offline=rng.random() < 0.2,
            front_end=rng.choice([0, 0, 0, 1]),
        ),
        forwarded=ForwardedRequest(endpoint="completions", body=b"{}") if is_forwarded else None,
    )


def text_end_position(seed: int, index: int) -> int:
    """Where the edge will find an end in a text that may have one; most are never reached."""
    return 1 + draw("text", seed, index) % 40


def worker_outcome(request: Request, seed: int, index: int, fake: FakeParameters) -> Outcome:
    """What the worker makes of a sequence if nobody cuts it short: a function of the request alone."""
    if request.scheduling.kind != "generate":
        return Outcome("complete", ())
    tokens: list[int] = []
    state = fold(0, request.prompt_token_ids) if fake.recurrent else 0
    while len(tokens) < request.sampling.max_tokens:
        drawn = draw("end", seed, index, len(tokens)) % MILLION
        if drawn < fake.end_ppm:
            return Outcome(ENDS[drawn % len(ENDS)], (*tokens, EOS_TOKEN_ID))
        tokens.append(state_token(seed, index, state) if fake.recurrent else fake_token(seed, index, len(tokens)))
        state = fold(state, tokens[-1:])
    return Outcome("length", tuple(tokens))


def forwarded_outcome(request: Request, seed: int, index: int) -> Outcome:
    """What another server makes of a sequence that is cut short by nobody."""
    if request.scheduling.kind != "generate":
        return Outcome("complete", ())
    seed, max_tokens = (seed + index) % 2**63, request.max_tokens
    length = answer_length(seed, max_tokens)
    return Outcome("length" if length == max_tokens else "stop", tuple(answer_tokens(seed, length)))


def is_expected(outcome: Outcome, request: Request, seed: int, index: int, fake: FakeParameters) -> bool:
    """Whether a sequence may end so. Only where it was cut short does anything but its request have a say."""
    if request.forwarded is not None:
        made = forwarded_outcome(request, seed, index)
        is_cut = outcome.reason in CUT_SHORT and outcome.tokens == made.tokens[: len(outcome.tokens)]
        return is_cut or outcome == made
    made = worker_outcome(request, seed, index, fake)
    if outcome.reason == "error" and not (request.scheduling.waits_for_grammar and not outcome.tokens):
        # Nobody pays for another's harm, nor for a worker that dies of itself.
        slot = poisoned_place(fake, seed, index)
        if slot is None or len(outcome.tokens) < slot:
            return False
    if outcome.reason in CUT_SHORT:
        return outcome.tokens == made.tokens[: len(outcome.tokens)]
    position = text_end_position(seed, index)
    if request.scheduling.has_text_ends and position <= len(made.tokens):
        made = Outcome("stop", made.tokens[:position])
    return outcome == made
