"""The families of /metrics of other servers that requests are forwarded to, one sample for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, get_args

from eventlm.events.forwarding import DRAINED, FailureKind
from eventlm.metrics.aggregates import BackendMetrics
from eventlm.metrics.components import EngineMetrics
from eventlm.metrics.family import COUNTER, GAUGE, HISTOGRAM, Family, Samples, Scope


class _Backend(NamedTuple):
    """Another server, and whether it takes requests."""

    sums: BackendMetrics
    is_up: bool


def _backends(metrics: EngineMetrics) -> Iterator[tuple[list[str], _Backend]]:
    for of_set, replicas in metrics.log.by_set():
        for replica in replicas:
            if replica.backend is not None and not replica.backend.is_gone:
                yield [of_set.model, replica.backend.name], _Backend(replica.backend, replica.is_up)


def _reported(field: str) -> Callable[[EngineMetrics], Samples]:
    """What backends say of themselves; without those that do not."""

    def samples(metrics: EngineMetrics) -> Samples:
        for labels, backend in _backends(metrics):
            if (value := getattr(backend.sums, field)) >= 0:
                yield labels, value

    return samples


def reported_usage(metrics: EngineMetrics) -> Samples:
    """Share of its KV cache in use, of each backend that says so."""
    return [(labels, ppm / 1_000_000) for labels, ppm in _reported("reported_kv_ppm")(metrics)]


BACKEND = ("model_name", "backend")
_backend = Scope(BACKEND, _backends, is_optional=True)

BACKEND_FAMILIES: tuple[Family, ...] = (
    _backend(GAUGE, "eventlm:backend_up", "1 while the backend takes requests.", lambda b: int(b.is_up)),
    _backend(GAUGE, "eventlm:backend_wanted", "0 while an operator has drained it.",
             lambda b: int(b.sums.down_reason != DRAINED)),
    _backend(GAUGE, "eventlm:backend_requests_running", "Attempts under way there.", lambda b: b.sums.num_running),
    _backend(GAUGE, "eventlm:backend_request_limit", "How many may be, as of the last one.", lambda b: b.sums.limit),
    Family(GAUGE, "eventlm:backend_reported_running", "Requests that it says it runs, from all clients.", BACKEND,
           _reported("reported_running"), is_optional=True),
    Family(GAUGE, "eventlm:backend_reported_waiting", "Requests that wait there, as it says.", BACKEND,
           _reported("reported_waiting"), is_optional=True),
    Family(GAUGE, "eventlm:backend_kv_cache_usage", "Its KV cache in use, as it says; 1 is all.", BACKEND,
           reported_usage, is_optional=True),
    _backend(COUNTER, "eventlm:backend_attempts", "Requests sent to it.", lambda b: b.sums.num_attempts),
    _backend(COUNTER, "eventlm:backend_answers", "Those that it answered to the end.", lambda b: b.sums.num_answers),
    _backend(COUNTER, "eventlm:backend_failures", "Those that failed.",
             lambda b: dict.fromkeys(get_args(FailureKind), 0) | b.sums.failures, by="kind"),
    _backend(COUNTER, "eventlm:backend_withdrawn", "Those ended because another backend answered first.",
             lambda b: b.sums.num_withdrawn),
    _backend(COUNTER, "eventlm:backend_retries", "Failures there after which the sequence was to be sent again.",
             lambda b: b.sums.num_retries),
    _backend(COUNTER, "eventlm:backend_hedges", "Second attempts there, beside a first one elsewhere.",
             lambda b: b.sums.num_hedges),
    _backend(COUNTER, "eventlm:backend_hedges_won", "Those of them that answered.", lambda b: b.sums.num_hedges_won),
    _backend(COUNTER, "eventlm:backend_prompt_tokens", "Prompt tokens of what it answered, as it counts them.",
             lambda b: b.sums.prompt_tokens),
    _backend(COUNTER, "eventlm:backend_prompt_tokens_cached", "Of those, tokens found in its prefix cache.",
             lambda b: b.sums.cached_tokens),
    _backend(COUNTER, "eventlm:backend_generation_tokens", "Tokens that it generated and that were shown.",
             lambda b: b.sums.generation_tokens),
    _backend(HISTOGRAM, "eventlm:backend_first_token_seconds", "From the sending of a request to the first tokens.",
             lambda b: b.sums.first_token),
)  # fmt: skip
