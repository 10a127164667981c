"""Histograms, and the table that declares each of them once, for the store that fills them and for /metrics.

Integers only; times are nanoseconds. Buckets are those of vLLM's dashboards.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import sub
from typing import Literal, NamedTuple

from msgspec import Struct

from eventlm.types import NANOSECONDS_PER_SECOND, parts_per_million


class Histogram(Struct, gc=False):
    """How many values fell at or below each bound (ascending), with one count more for those above; and their sum."""

    bounds: tuple[int, ...]
    counts: list[int]
    total: int = 0

    @classmethod
    def over(cls, bounds: tuple[int, ...]) -> Histogram:
        """An empty one."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: int, count: int = 1) -> None:
        """Add a value that occurred `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def copy(self) -> Histogram:
        """One that later values do not change."""
        return Histogram(self.bounds, self.counts.copy(), self.total)

    def since(self, before: Histogram) -> Histogram:
        """What was added to an earlier copy."""
        return Histogram(self.bounds, list(map(sub, self.counts, before.counts)), self.total - before.total)


def seconds(text: str) -> tuple[int, ...]:
    """Bounds in nanoseconds, exactly as their decimals read."""
    return tuple(parts_per_million(bound) * (NANOSECONDS_PER_SECOND // 1_000_000) for bound in text.split())


def one_two_five_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to `largest`."""
    bounds = []
    power = 1
    while power <= largest:
        bounds += [power * factor for factor in (1, 2, 5) if power * factor <= largest]
        power *= 10
    return tuple(bounds)


TTFT = seconds(".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
INTER_TOKEN = seconds(".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
LATENCY = seconds(".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_STEP = seconds(".0001 .00025 .0005 .001 .0025 .005 .01 .025 .05 .1 .25 .5 1 2.5 5 10")
_SLACK = seconds("-60 -10 -5 -2.5 -1 -.5 -.25 -.1 0 .1 .25 .5 1 2.5 5 10 60")
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REPETITIONS = (1, 2, 3, 4, 5, 10, 20)


class HistogramFamily(NamedTuple):
    """A histogram of each replica: its key in the store, its name and help in /metrics, its buckets and its source.

    bounds: None: 1, 2, 5, 10, 20 and so on up to the context. source: `request`: an attribute of the `RequestRow` of
    each sequence that ran to its end; `step`: of the `StepRow` of each step; `event`: the store observes it as it
    happens. field: empty if it is named as the key. Keys are Vajra's names, where Vajra has one.
    """

    key: str
    name: str
    help: str
    bounds: tuple[int, ...] | None
    source: Literal["request", "step", "event"]
    field: str = ""

    @property
    def is_time(self) -> bool:
        """Nanoseconds here, seconds in /metrics."""
        return self.name.endswith("_seconds")


HISTOGRAMS = tuple(
    HistogramFamily(*row)
    for row in (
        ("prefill_e2e_time", "vllm:time_to_first_token_seconds", "Time to first token.", TTFT, "event"),
        ("decode_token_execution_plus_preemption_time", "vllm:inter_token_latency_seconds",
         "Time between two outputs of a request.", INTER_TOKEN, "event"),
        ("request_time_per_output_token", "vllm:request_time_per_output_token_seconds", "Mean time per output token.",
         INTER_TOKEN, "request"),
        ("request_e2e_time", "vllm:e2e_request_latency_seconds", "Reception of a request to its end.",
         LATENCY, "request"),
        ("request_scheduling_delay", "vllm:request_queue_time_seconds", "Arrival to first launch.", LATENCY, "request"),
        ("request_prefill_time", "vllm:request_prefill_time_seconds", "First launch to first token.",
         LATENCY, "request"),
        ("request_decode_time", "vllm:request_decode_time_seconds", "First token to last.", LATENCY, "request"),
        ("request_inference_time", "vllm:request_inference_time_seconds", "First launch to last token.",
         LATENCY, "request"),
        ("request_execution_time", "eventlm:request_execution_time_seconds", "Time during which a request held blocks.",
         LATENCY, "request"),
        ("request_preemption_time", "eventlm:request_preemption_time_seconds", "Time waited after preemptions.",
         LATENCY, "request"),
        ("batch_execution_time", "eventlm:batch_execution_time_seconds", "A step, by the worker's clock.",
         _STEP, "step"),
        ("inter_batch_delay", "eventlm:inter_batch_delay_seconds", "Pause between two steps while there was work.",
         _STEP, "step"),
        ("deadline_slack", "eventlm:deadline_slack_seconds", "What was left of a deadline at the first token.",
         _SLACK, "event"),
        ("request_prompt_tokens", "vllm:request_prompt_tokens", "Prompt tokens of a request.",
         None, "request", "prompt_tokens"),
        ("request_computed_tokens", "vllm:request_prefill_kv_computed_tokens",
         "Prompt tokens of a request that were not in the prefix cache.", None, "request", "computed_tokens"),
        ("request_generation_tokens", "vllm:request_generation_tokens", "Output tokens of a request.",
         None, "request", "output_tokens"),
        ("request_max_num_generation_tokens", "vllm:request_max_num_generation_tokens",
         "Output tokens of the longest of a request's samples.", None, "event"),
        ("batch_num_tokens", "vllm:iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS, "step"),
        ("request_num_preemptions", "vllm:request_num_preemptions", "Preemptions of a request.",
         _REPETITIONS, "request"),
        ("request_num_restarts", "eventlm:request_num_restarts", "Prefills of a request started again.",
         _REPETITIONS, "request"),
        ("batch_size", "eventlm:batch_size", "Sequences in a step.", _STEP_TOKENS, "step"),
    )
)  # fmt: skip


def fields_of(source: Literal["request", "step"]) -> list[tuple[str, str]]:
    """(field of the row, key of its histogram) of each histogram with this source."""
    return [(family.field or family.key, family.key) for family in HISTOGRAMS if family.source == source]


def make_histograms(max_model_len: int) -> dict[str, Histogram]:
    """All histograms of a replica by key, empty. Those of lengths reach up to the context."""
    lengths = one_two_five_buckets(max_model_len)
    return {family.key: Histogram.over(family.bounds or lengths) for family in HISTOGRAMS}
