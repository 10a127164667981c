"""The small worlds that are searched. By default: 2 replicas with 5 blocks each and 2 steps in flight."""

from __future__ import annotations

from typing import Any

from eventlm.config.core import Forwarding
from eventlm.core.plugin import Policy, Router
from eventlm.policies.dynamic import Dynamic
from eventlm.policies.edf import Edf
from eventlm.policies.fcfs import Fcfs
from eventlm.policies.least_loaded import LeastLoaded
from eventlm.policies.lpm import Lpm
from eventlm.policies.lrs import Lrs
from eventlm.policies.prefix_affinity import PrefixAffinity
from eventlm.policies.round_robin import RoundRobin
from eventlm.policies.session_affinity import SessionAffinity
from eventlm.policies.space_sharing import SpaceSharing
from tests.world.scopes.world import Arrivals, Scope, requests

SECOND_NS = 1_000_000_000
#: Deadlines that differ by more than the margin of every policy below: a request with the first may evict one with the
#: second.
URGENT_NS, PATIENT_NS = 10 * SECOND_NS, 100 * SECOND_NS
POLICIES: dict[str, Policy] = {"fcfs": Fcfs(), "edf": Edf(), "lrs": Lrs(evict_margin=0), "lpm": Lpm()}
#: Routers besides the default, `pull`.
ROUTERS: dict[str, Router] = {
    "round-robin": RoundRobin(),
    "least-loaded": LeastLoaded(),
    "prefix-affinity": PrefixAffinity(),
    "session-affinity": SessionAffinity(spill_tokens=0),
}
ONE = {"num_replicas": 1}
DEEP = {"max_steps_in_flight": 3, "max_decodes_in_flight_per_seq": 3}

DYNAMIC = Dynamic(min_chunk_tokens=1, target_ms=2.1)

#: Two requests grow until there are too few blocks for both, and each may hit prompt and output blocks of the other; a
#: third one is urgent.
GROWING = (requests(2, 5, count=2, deadline_ns=PATIENT_NS, session=1), requests(4, 2, deadline_ns=URGENT_NS, session=2))
CHUNKED = (requests(5, 2, count=2, deadline_ns=PATIENT_NS), requests(3, 2, deadline_ns=URGENT_NS))
EQUAL = (requests(3, 3, count=3),)
SAMPLED = (requests(3, 3, n=2), requests(3, 3))
FOUR = (requests(2, 5, count=2, deadline_ns=PATIENT_NS), requests(4, 2, count=2, deadline_ns=URGENT_NS))
WATCHED = (requests(2, 4, has_text_ends=True), requests(3, 3, waits_for_grammar=True), requests(2, 3, front_end=1))
LATE = (requests(3, 3, count=2, deadline_ns=URGENT_NS, drop_if_late=True), requests(4, 3))
SHARING = (requests(4, 2, count=2, blocks=[1, 2]), requests(5, 3, blocks=[1, 3]))
#: A lower priority goes first under every policy, and evicts others.
PREFERRED = (requests(2, 5, count=2), requests(4, 2, priority=-1))
#: More and longer requests, for one replica, which has fewer states.
LONGER = (
    requests(2, 6, count=3, deadline_ns=PATIENT_NS),
    requests(4, 2, count=2, deadline_ns=URGENT_NS),
)
#: Each mix is searched under all policies: requests, chances and limits, with some 100,000 states each.
MIXES: dict[str, tuple[tuple[Arrivals, ...], str, dict[str, Any]]] = {
    "growing": (GROWING, "cancel cancel lose end*", {}),
    "chunked": (CHUNKED, "cancel cancel lose lose end*", {}),
    "sharing": (SHARING, "cancel cancel lose lose end*", {}),
    "preferred": (PREFERRED, "cancel lose end*", {}),
    "four": (FOUR, "cancel lose", {}),
    "longer": (LONGER, "cancel cancel lose end*", ONE),
}
UNREAD = (requests(4, 2, count=2, blocks=[1, 2], skip_cache_read=True), requests(4, 2, blocks=[1, 2]))
GROUPED = (requests(3, 3, count=2, group_size=2), requests(2, 3, count=2))
HEDGED = (requests(3, 1, count=2, deadline_ns=URGENT_NS),)
HEDGED_LATE = (requests(3, 2, deadline_ns=URGENT_NS, drop_if_late=True), requests(3, 2, deadline_ns=URGENT_NS))
MICRO_BATCHES = {"num_stages": 2, "micro_batches": 3}
GROUPS = {"num_kv_groups": 2, "kv_shard_tokens": 2, "num_blocks": 3}
RECURRENT = {"state_slots": 3, "state_interval": 2}
FORWARDED = {
    "forwards": Forwarding(max_attempts=3, backoff_ns=SECOND_NS, hedge_ns=5 * SECOND_NS, first_limit=1),
    "max_num_seqs": 2,
}


def _scope(name: str, arrivals: tuple[Arrivals, ...], chances: str, **parts: Any) -> Scope:
    """A scope. chances: a name for each time that something may happen; `end*`: as often as possible."""
    names = chances.split()
    counts = {each.rstrip("*"): -1 if each.endswith("*") else names.count(each) for each in names}
    return Scope(name, arrivals, counts, **parts)


def _watched(prompt_tokens: int, max_tokens: int, **fields: Any) -> Arrivals:
    return requests(prompt_tokens, max_tokens, has_text_ends=True, **fields)


#: The scopes that `make test` searches.
SMALL = [
    _scope("one-fcfs", GROWING, "cancel lose", limits=ONE),
    _scope("one-edf", GROWING, "cancel lose", policies=(Edf(),), limits=ONE),
    _scope("one-lrs", GROWING, "cancel lose", policies=(Lrs(evict_margin=0),), limits=ONE),
    _scope("equal", EQUAL, "cancel"),
    _scope("watched", WATCHED, "", limits=ONE),
    _scope("late", LATE, "", limits=ONE),
    _scope("grouped", GROUPED, "cancel", limits=ONE | {"max_queue_len": 1}),
    _scope("forwarded", HEDGED, "fail", limits=FORWARDED),
    _scope("joined-forwarded", (requests(3, 1, count=2),), "cancel fail", limits=FORWARDED, joins=True),
    _scope("joined-paused", (requests(3, 2, count=2),), "lose pause", limits=ONE, joins=True),
    _scope(
        "joined-refused", (_watched(3, 2, count=2, waits_for_grammar=True),), "refuse text lose", limits=ONE, joins=True
    ),
    _scope("sampled-watched", (_watched(3, 2, n=2), requests(3, 2)), "cancel lose end* text", limits=ONE),
    _scope("groups-watched", (_watched(2, 4, count=2),), "cancel lose end* text", limits=ONE | GROUPS),
    _scope(
        "speculating-pipeline",
        (_watched(2, 4), requests(3, 3)),
        "cancel lose end* text",
        limits=ONE | {"num_stages": 2, "max_tokens_per_row": 2},
    ),
    _scope("micro-batches", (requests(2, 3, count=3),), "cancel lose end*", limits=ONE | MICRO_BATCHES),
    _scope(
        "recurrent-sampled",
        (requests(4, 2, n=2, blocks=[1, 2]), requests(4, 2, blocks=[1, 3])),
        "cancel lose end*",
        limits=ONE | RECURRENT,
    ),
    _scope("recovered", (requests(2, 4, count=2), requests(4, 2)), "recover recover recover", limits=ONE),
    _scope(
        "recovered-watched",
        (_watched(2, 2, waits_for_grammar=True), requests(3, 2)),
        "recover* lose end* text",
        limits=ONE,
    ),
    _scope("recovered-forwarded", (requests(3, 1, deadline_ns=URGENT_NS),), "recover*", limits=FORWARDED),
    _scope("unread", UNREAD, "cancel lose flush", limits=ONE),
    _scope("scored", (requests(5, 0, count=2, kind="score"), requests(3, 3)), "cancel lose", limits=ONE),
    _scope("run-ahead", (requests(2, 4, count=2), requests(5, 2)), "cancel lose", limits=ONE | {"run_ahead_ms": 2}),
    _scope(
        "buckets", (requests(2, 3, count=3),), "cancel lose", limits=ONE | {"graph_buckets": [2], "max_num_seqs": 3}
    ),
]
#: The scopes that `make soak` searches too.
SOAK = [
    *(
        _scope(f"{mix}-{name}", arrivals, chances, policies=(policy,), limits=limits)
        for mix, (arrivals, chances, limits) in MIXES.items()
        for name, policy in POLICIES.items()
    ),
    *(_scope(name, GROWING, "cancel lose end*", router=router) for name, router in ROUTERS.items()),
    *(_scope(f"{name}-four", FOUR, "cancel lose", router=router) for name, router in ROUTERS.items()),
    _scope("dynamic", CHUNKED, "cancel cancel lose end*", batcher=DYNAMIC),
    _scope(
        "space-sharing",
        CHUNKED,
        "cancel cancel lose end*",
        batcher=SpaceSharing(min_chunk_tokens=1, target_ms=2.1, min_long_steps=0),
    ),
    _scope("predicted", CHUNKED, "cancel lose predict end*", batcher=DYNAMIC),
    _scope("predicted-lrs", GROWING, "cancel predict end*", policies=(Lrs(evict_margin=0),)),
    _scope("grouped-all", GROUPED, "cancel lose end*", limits={"max_queue_len": 1, "max_num_seqs": 1}),
    _scope("ended-together", GROWING, "cancel lose ends*"),
    _scope("three-replicas", GROWING, "lose", limits={"num_replicas": 3}),
    _scope("three-steps", GROWING, "cancel lose lose end*", limits=ONE | DEEP),
    _scope("sampled", SAMPLED, "cancel cancel lose lose end*"),
    _scope("swapped", GROWING, "cancel swap swap end", policies=(Edf(), Lrs(evict_margin=0))),
    _scope("paused", GROWING, "lose pause"),
    _scope("flushed", GROWING, "replace flush"),
    _scope("watched-all", WATCHED, "lose end* text* refuse"),
    _scope("watched-ended", WATCHED, "cancel end* text* refuse front_end"),
    _scope("late-all", LATE, "lose end*"),
    _scope("late-paused", LATE, "cancel pause end*"),
    *(_scope(f"paused-{name}", GROWING, "lose pause", policies=(POLICIES[name],)) for name in ("edf", "lrs", "lpm")),
    *(
        _scope(f"late-paused-{name}", LATE, "cancel pause end*", policies=(POLICIES[name],))
        for name in ("edf", "lrs", "lpm")
    ),
    _scope("joined", EQUAL, "cancel lose", joins=True),
    _scope("joined-growing", GROWING, "cancel lose end", limits=ONE, joins=True),
    _scope("speculating", GROWING, "cancel lose end*", limits={"max_tokens_per_row": 2}),
    _scope("pipeline", GROWING, "cancel lose end*", limits={"num_stages": 2, "max_num_seqs": 1}),
    _scope("groups", GROWING, "cancel lose", limits=GROUPS),
    _scope("recurrent", SHARING, "cancel lose flush end*", limits=RECURRENT),
    _scope(
        "two-sets",
        (requests(2, 3), requests(3, 1, count=2, replicaset=1, deadline_ns=URGENT_NS)),
        "cancel lose fail",
        limits=ONE,
        others=(FORWARDED,),
    ),
    _scope("poison", EQUAL, "cancel crash crash lose stale", limits={"max_losses": 3}),
    _scope("silent", GROWING, "cancel lose none none none end*", limits=ONE),
    _scope("forwarded-all", EQUAL, "cancel fail fail down", limits=FORWARDED),
    _scope("forwarded-metrics", EQUAL, "cancel fail later metrics metrics", limits=FORWARDED),
    _scope("forwarded-drained", EQUAL, "cancel fail down pause", limits=FORWARDED),
    _scope("hedged", HEDGED_LATE, "fail fail down", limits=FORWARDED),
    _scope("hedged-joined", HEDGED_LATE, "fail", limits=FORWARDED, joins=True),
    _scope("forwarded-sampled", (requests(3, 2, n=2),), "cancel fail fail down metrics", limits=FORWARDED),
    _scope("recovered-all", GROWING, "recover recover recover"),
    _scope("recovered-joined", EQUAL, "lose recover recover", limits=ONE, joins=True),
    _scope("recovered-late", LATE, "recover* pause end*", limits=ONE),
    _scope("recovered-forwarded-twice", HEDGED, "recover recover fail", limits=FORWARDED),
    _scope("recovered-forwarded-all", HEDGED_LATE, "cancel recover recover fail down", limits=FORWARDED),
    _scope("watched-joined", WATCHED, "cancel lose text", limits=ONE, joins=True),
    _scope("paused-joined", (requests(3, 2, count=3),), "cancel lose pause", joins=True),
    _scope(
        "poison-joined", (requests(3, 2, count=2),), "cancel crash crash lose", limits={"max_losses": 2}, joins=True
    ),
    _scope("sampled-joined", (requests(3, 3, n=2), requests(3, 2)), "cancel lose end", joins=True),
    _scope("sampled-watched-all", (_watched(3, 3, n=2), requests(3, 2, count=2)), "cancel cancel lose end* text*"),
    _scope("groups-watched-all", (_watched(2, 4, count=2),), "cancel cancel lose lose end* text", limits=GROUPS),
    _scope(
        "speculating-pipeline-all",
        (_watched(2, 4, count=2), requests(3, 3)),
        "lose end* text",
        limits={"num_stages": 2, "max_tokens_per_row": 2},
    ),
    _scope("micro-batches-all", (requests(2, 3, count=4),), "cancel cancel lose lose end*", limits=MICRO_BATCHES),
    _scope(
        "recurrent-sampled-all",
        (requests(4, 2, n=2, blocks=[1, 2]), requests(4, 2, count=2, blocks=[1, 3])),
        "cancel lose flush end*",
        limits=RECURRENT,
    ),
    _scope("unread-all", UNREAD, "cancel cancel lose flush end*"),
    _scope(
        "scored-all",
        (requests(5, 0, count=2, kind="score"), requests(2, 5, count=2)),
        "cancel lose end*",
    ),
    _scope("run-ahead-all", GROWING, "cancel lose end*", limits={"run_ahead_ms": 2}),
    _scope("buckets-all", GROWING, "cancel lose end*", limits={"graph_buckets": [2], "max_num_seqs": 3}),
    _scope(
        "few-evictions",
        FOUR,
        "cancel lose end*",
        policies=(Edf(),),
        limits=ONE | {"max_evictions": 1, "max_skips": 0},
    ),
    _scope("six-blocks", (requests(2, 6, count=3), requests(5, 3)), "cancel lose", limits={"num_blocks": 6}),
]
