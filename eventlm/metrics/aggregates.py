"""What the metrics store adds up: histograms, counters and gauges, one set for each replica. Integers only.

Times are nanoseconds. The names of histograms are those of the reports; buckets are those of vLLM's dashboards.
"""

from __future__ import annotations

from bisect import bisect_left

from msgspec import Struct, field

from eventlm.types import NANOSECONDS_PER_SECOND, parts_per_million


def seconds(text: str) -> tuple[int, ...]:
    """Bounds in nanoseconds, exactly as their decimals read."""
    return tuple(parts_per_million(bound) * (NANOSECONDS_PER_SECOND // 1_000_000) for bound in text.split())


TTFT_BUCKETS_NS = seconds(".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
INTER_TOKEN_BUCKETS_NS = seconds(".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
LATENCY_BUCKETS_NS = seconds(".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
STEP_BUCKETS_NS = seconds(".0001 .00025 .0005 .001 .0025 .005 .01 .025 .05 .1 .25 .5 1 2.5 5 10")
SLACK_BUCKETS_NS = seconds("-60 -10 -5 -2.5 -1 -.5 -.25 -.1 0 .1 .25 .5 1 2.5 5 10 60")
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REPETITION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


def one_two_five_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on up to `largest`."""
    bounds = []
    power = 1
    while power <= largest:
        bounds += [power * factor for factor in (1, 2, 5) if power * factor <= largest]
        power *= 10
    return tuple(bounds)


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
        """Take in a value that occurred `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_values(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        """One that later values do not change."""
        return Histogram(self.bounds, self.counts.copy(), self.total)


#: Of each sequence that ran to its end. Names are Vajra's, where Vajra has one.
REQUEST_HISTOGRAMS = {
    # From the request's reception to its last output.
    "request_e2e_time": LATENCY_BUCKETS_NS,
    # From its arrival at the scheduler to the launch of its first chunk.
    "request_scheduling_delay": LATENCY_BUCKETS_NS,
    # Held blocks and a slot, from a first chunk's launch on.
    "request_execution_time": LATENCY_BUCKETS_NS,
    # Waited again because it was preempted.
    "request_preemption_time": LATENCY_BUCKETS_NS,
    # First launch to first token, first token to last, first launch to last token; the second per token but the first.
    "request_prefill_time": LATENCY_BUCKETS_NS,
    "request_decode_time": LATENCY_BUCKETS_NS,
    "request_inference_time": LATENCY_BUCKETS_NS,
    "request_time_per_output_token": INTER_TOKEN_BUCKETS_NS,
    "request_num_preemptions": REPETITION_BUCKETS,
    # Prefills begun anew behind a preemption.
    "request_num_restarts": REPETITION_BUCKETS,
}
#: Of each sequence, as it happens, whatever becomes of it.
TOKEN_HISTOGRAMS = {
    # Time to first token, from the request's reception.
    "prefill_e2e_time": TTFT_BUCKETS_NS,
    # Time between two outputs of a sequence.
    "decode_token_execution_plus_preemption_time": INTER_TOKEN_BUCKETS_NS,
    # What was left of a deadline at the first token; negative where it was late.
    "deadline_slack": SLACK_BUCKETS_NS,
}
#: Of each sequence that ran to its end; the last of each request, over those of its samples that did.
LENGTH_HISTOGRAMS = ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens")
#: Of each completed step.
STEP_HISTOGRAMS = {
    "batch_size": STEP_TOKEN_BUCKETS,
    "batch_num_tokens": STEP_TOKEN_BUCKETS,
    # By the worker's own clock.
    "batch_execution_time": STEP_BUCKETS_NS,
    # From a step's end to the start of the next, where there was work at that end.
    "inter_batch_delay": STEP_BUCKETS_NS,
}


def make_histograms(max_model_len: int) -> dict[str, Histogram]:
    """All of a replica's, empty. Those of lengths reach to the context."""
    lengths = one_two_five_buckets(max_model_len)
    bounds = REQUEST_HISTOGRAMS | TOKEN_HISTOGRAMS | STEP_HISTOGRAMS
    bounds |= dict.fromkeys(LENGTH_HISTOGRAMS, lengths)
    return {name: Histogram.over(of_name) for name, of_name in bounds.items()}


class ReplicaMetrics(Struct, kw_only=True, gc=False):
    """Sums over one replica. Sequences are counted, not requests: each of a request's `n` samples is one.

    What no replica has yet (sequences in the shared queue, rejected requests) counts under replica 0, so that a sum
    over replicas is right.
    """

    histograms: dict[str, Histogram]
    #: Gauges. Running is a sequence from its launch on; waiting for its grammar is part of waiting.
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_grammar: int = 0
    num_held_blocks: int = 0
    is_up: bool = False
    #: Prompt tokens of sequences whose prefill is done, those of them that were hit, and tokens shown.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    #: Prompt tokens looked up in the prefix cache at a first admission, and those found.
    queried_tokens: int = 0
    hit_tokens: int = 0
    num_deadlines_met: int = 0
    num_deadlines_missed: int = 0
    num_steps: int = 0
    busy_ns: int = 0
    num_workers_lost: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    preempt_reasons: dict[str, int] = field(default_factory=dict)
    reject_reasons: dict[str, int] = field(default_factory=dict)
    #: Nanoseconds by operation, where the workers were asked for them.
    op_ns: dict[str, int] = field(default_factory=dict)

    def copy(self) -> ReplicaMetrics:
        """One that later events do not change."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        values = {name: value.copy() if isinstance(value, dict) else value for name, value in values.items()}
        values["histograms"] = {name: histogram.copy() for name, histogram in self.histograms.items()}
        return ReplicaMetrics(**values)


class ClassMetrics(Struct, kw_only=True, gc=False):
    """Sums over one class. Sequences are counted but for `num_requests` and `reject_reasons`.

    Deadlines are those of the requests themselves. One that the engine cut short has missed its objectives; one that
    was cancelled counts for neither.
    """

    num_requests: int = 0
    reject_reasons: dict[str, int] = field(default_factory=dict)
    num_complete: int = 0
    #: Ended for they were late.
    num_dropped: int = 0
    num_deadlines_met: int = 0
    num_deadlines_missed: int = 0
    num_slo_met: int = 0
    num_slo_missed: int = 0
    output_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram.over(TTFT_BUCKETS_NS))
    queue: Histogram = field(default_factory=lambda: Histogram.over(LATENCY_BUCKETS_NS))
    e2e: Histogram = field(default_factory=lambda: Histogram.over(LATENCY_BUCKETS_NS))

    def copy(self) -> ClassMetrics:
        """One that later events do not change."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        values = {
            name: value.copy() if isinstance(value, Histogram | dict) else value for name, value in values.items()
        }
        return ClassMetrics(**values)


class MetricsSnapshot(Struct, frozen=True, kw_only=True):
    """All that the store had added up when it was taken.

    duration_ns: what the log covers, which is less than the run where its first segments are not kept. num_unseen:
    sequences that ended and whose beginning the log does not hold. num_cut: sequences that were live when
    the log lost events; nothing more is measured of them.
    """

    model: str = ""
    num_blocks: int = 0
    num_events: int = 0
    duration_ns: int = 0
    num_requests: int = 0
    num_unseen: int = 0
    num_cut: int = 0
    num_plugin_failures: int = 0
    replicas: list[ReplicaMetrics] = []
    #: By name, in its order.
    classes: dict[str, ClassMetrics] = {}
