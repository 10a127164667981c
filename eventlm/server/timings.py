"""`eventlm.timings` of a reply: where the time of each choice went.

The engine's metrics, `eventlm trace stats` and `eventlm explain` have the same figures. Times that were not reached are
null. `edge_ms`, `queued_ms` and `prefill_ms` add up to `ttft_ms` if nothing was preempted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from msgspec import Struct, structs

from eventlm.metrics.rows import RequestRow
from eventlm.types import NANOSECONDS_PER_MILLISECOND

T = TypeVar("T", bound=Struct)


class ChoiceTimings(Struct, frozen=True, kw_only=True):
    """One choice. Times in ms, to the nanosecond, by the engine's clock.

    index: of the choice. request: the seq of its arrival in the trace; sample: its number among the request's `n`.
    edge_ms: from the reception to the scheduler. queued_ms: to the launch of its first step. prefill_ms: to its first
    token. decode_ms: to its last token. preempted_ms: time after preemptions. (An explanation's parts have other
    borders: `docs/http-api.md`.) ttft_ms, total_ms: from the reception to the first token, and to the end. tpot_ms: per
    token after the first. deadline_met, slo_met: null without a deadline, and without objectives.
    """

    index: int
    request: int
    sample: int
    replica: int
    service_class: str
    edge_ms: float
    queued_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    preempted_ms: float | None
    num_preemptions: int
    ttft_ms: float | None
    tpot_ms: float | None
    total_ms: float
    cached_tokens: int
    deadline_met: bool | None
    slo_met: bool | None


class EventlmReply(Struct, frozen=True):
    """`eventlm` of a reply: `timings` of its choices, in their order."""

    timings: list[ChoiceTimings]


def with_timings(reply: T, rows: Mapping[int, RequestRow]) -> T:
    """A reply, or its last chunk, with timings."""
    return structs.replace(reply, eventlm=timings(rows))


def timings(rows: Mapping[int, RequestRow]) -> EventlmReply:
    """The timings of choices that are over, by their numbers."""
    return EventlmReply([choice_timings(choice, row) for choice, row in sorted(rows.items())])


def choice_timings(choice: int, row: RequestRow) -> ChoiceTimings:
    """The timings of one choice."""
    return ChoiceTimings(
        index=choice,
        request=row.request,
        sample=row.index,
        replica=row.replica,
        service_class=row.service_class,
        edge_ms=row.edge_ns / NANOSECONDS_PER_MILLISECOND,
        queued_ms=_ms(row.request_scheduling_delay),
        prefill_ms=_ms(row.request_prefill_time),
        decode_ms=_ms(row.request_decode_time),
        preempted_ms=_ms(row.request_preemption_time),
        num_preemptions=row.request_num_preemptions,
        ttft_ms=_ms(row.prefill_e2e_time),
        tpot_ms=_ms(row.request_time_per_output_token),
        total_ms=row.request_e2e_time / NANOSECONDS_PER_MILLISECOND,
        cached_tokens=row.cached_tokens,
        deadline_met=row.met_deadline,
        slo_met=row.met_slo,
    )


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / NANOSECONDS_PER_MILLISECOND
