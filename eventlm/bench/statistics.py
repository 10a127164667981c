"""Statistics of the records of a load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy
from msgspec import Struct

from eventlm.bench.records import LoadResult, RequestRecord
from eventlm.config.objectives import Objectives


class SampleDistribution(Struct, frozen=True):
    """Mean, percentiles (linear interpolation between the samples beside them) and maximum."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Goodput(Struct, frozen=True):
    """Requests per second that met the objectives, and their share of all that were sent."""

    objectives_ms: Objectives
    requests_per_second: float
    share: float


class Statistics(Struct, frozen=True, kw_only=True):
    """One load in numbers. Latencies are of successful requests; None where there are none.

    `errors` counts the others by kind, and `retries` the failed attempts that were followed by another. `duration_s` is
    from the start to the last event. `late_ms` is how long after its intended time the client sent a request.
    `drawn_rate` is that of the intended times, `sent_rate` that of the sends, both over the time between the first and
    the last. `cpu_share` is the client's own use of one core, that of the busiest rank where there are several.
    `post_kernel_ms` is the time of the kernels behind answers, of which `num_post_kernels` ran.
    """

    num_requests: int
    num_success: int
    errors: dict[str, int]
    retries: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput: Goodput | None
    ttft_ms: SampleDistribution | None
    tpot_ms: SampleDistribution | None
    inter_token_ms: SampleDistribution | None
    e2e_ms: SampleDistribution | None
    drawn_rate: float | None
    sent_rate: float | None
    late_ms: SampleDistribution | None
    mean_concurrency: float
    peak_concurrency: int
    cpu_share: float
    num_post_kernels: int
    post_kernel_ms: SampleDistribution | None


def distribution(values: Sequence[float]) -> SampleDistribution | None:
    """The distribution of `values`; None without any."""
    if not len(values):
        return None
    array = numpy.asarray(values, dtype=numpy.float64)
    p50, p90, p95, p99 = map(float, numpy.percentile(array, (50, 90, 95, 99)))
    return SampleDistribution(float(array.mean()), p50, p90, p95, p99, float(array.max()))


def summarize(result: LoadResult, objectives: Objectives | None = None) -> Statistics:
    """The statistics of a load."""
    records = result.records
    successes = [record for record in records if record.is_success]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in successes)
    output_tokens = sum(record.output_tokens for record in successes)
    duration_s = result.duration_ns / 1e9
    return Statistics(
        num_requests=len(records),
        num_success=len(successes),
        errors=dict(Counter(record.error for record in records if not record.is_success).most_common()),
        retries=dict(Counter(kind for record in records for kind in record.retried).most_common()),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=_rate(len(successes), duration_s),
        output_tokens_per_second=_rate(output_tokens, duration_s),
        total_tokens_per_second=_rate(prompt_tokens + output_tokens, duration_s),
        goodput=_goodput(records, successes, objectives, duration_s),
        ttft_ms=_milliseconds(record.ttft_ns for record in successes),
        tpot_ms=_milliseconds(record.tpot_ns for record in successes if record.tpot_ns is not None),
        inter_token_ms=_milliseconds(gap for record in successes for gap in record.inter_token_ns),
        e2e_ms=_milliseconds(record.e2e_ns for record in successes),
        drawn_rate=_rate_of_times([record.intended_ns for record in records]),
        sent_rate=_rate_of_times([record.sent_ns for record in records]),
        late_ms=_milliseconds(record.sent_ns - record.intended_ns for record in records),
        mean_concurrency=_rate(sum(record.end_ns - record.sent_ns for record in records) / 1e9, duration_s),
        peak_concurrency=max((count for _, count in concurrency(records)), default=0),
        cpu_share=_rate(result.cpu_ns, result.duration_ns),
        num_post_kernels=sum(record.post_kernel_ns is not None for record in records),
        post_kernel_ms=_milliseconds(record.post_kernel_ns for record in records if record.post_kernel_ns is not None),
    )


def concurrency(records: Sequence[RequestRecord]) -> list[tuple[int, int]]:
    """Times in ns after the start at which the number of requests under way changes, each with the new number."""
    changes = Counter(record.sent_ns for record in records)
    changes.subtract(Counter(record.end_ns for record in records))
    steps, running = [], 0
    for time_ns in sorted(changes):
        running += changes[time_ns]
        steps.append((time_ns, running))
    return steps


def _goodput(
    records: list[RequestRecord], successes: list[RequestRecord], objectives: Objectives | None, duration_s: float
) -> Goodput | None:
    if objectives is None:
        return None
    num_good = sum(
        objectives.are_met_by(ttft_ns=record.ttft_ns, tpot_ns=record.tpot_ns, e2e_ns=record.e2e_ns)
        for record in successes
    )
    return Goodput(objectives, _rate(num_good, duration_s), _rate(num_good, len(records)))


def _milliseconds(values_ns: Iterable[float]) -> SampleDistribution | None:
    return distribution([value_ns / 1e6 for value_ns in values_ns])


def _rate(amount: float, over: float) -> float:
    return amount / over if over else 0.0


def _rate_of_times(times_ns: list[int]) -> float | None:
    """Events per second between the first and the last; None if there is no time between them."""
    span_ns = max(times_ns, default=0) - min(times_ns, default=0)
    return (len(times_ns) - 1) / (span_ns / 1e9) if span_ns else None
