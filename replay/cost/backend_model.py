"""A model of other servers as they are seen from here: when an answer begins, how it goes on, and how often it fails.

Nothing is known of what goes on inside such a server, so there are few parameters, and none of them lets a request be
faster for more load or a longer prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, to_builtins

from eventlm.core.predictor import NotNegative
from eventlm.events.forwarding import FailureKind
from eventlm.replay.cost.model import MILLION, CostModel, Positive

Share = Annotated[int, Meta(ge=0, le=MILLION)]


class FailureRate(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How often attempts fail in one way, in parts per million of all. delay_ns: from the attempt's start to a failure
    without a token. begun_ppm: of these failures, those after some tokens. status, retry_after_ns, can_continue: what
    the failed attempt tells (see `forward_failed`).
    """

    kind: FailureKind
    rate_ppm: Share
    delay_ns: NotNegative = 0
    begun_ppm: Share = 0
    status: NotNegative = 0
    retry_after_ns: NotNegative = 0
    can_continue: bool = False


class BackendCost(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One server. Times in ns, of single tokens in ps.

    The first token of an answer comes after `first_ns`, `prefill_ps` for each token of the prompt that the cache lacks,
    `queued_ppm` of the time that the prompts before it still take there (0: prompts are computed side by side, a
    million: one after the other), and `running_ns` for each answer that has begun there. A further token comes after
    `token_ps`, and `token_running_ps` more for each other answer that has begun; `stall_ps` more for each prompt token
    that is computed meanwhile. The end comes `end_ns` after the last token.

    slots: requests that it runs at once, while others wait there; 0: all that it gets. first_ratios_ppm,
    token_ratios_ppm: measured times over those of the model, all equally likely; empty: no noise.
    """

    name: str = ""
    kind: str = ""
    first_ns: NotNegative = 0
    prefill_ps: NotNegative = 0
    queued_ppm: Share = MILLION
    running_ns: NotNegative = 0
    token_ps: Positive = 1
    token_running_ps: NotNegative = 0
    stall_ps: NotNegative = 0
    end_ns: NotNegative = 0
    slots: NotNegative = 0
    first_ratios_ppm: list[Positive] = []
    token_ratios_ppm: list[Positive] = []
    failures: list[FailureRate] = []

    def prefill_ns(self, num_tokens: int) -> int:
        """What the server needs for so many tokens of a prompt."""
        return self.prefill_ps * num_tokens // 1000

    def first_token_ns(self, num_tokens: int, *, queued_ns: int, num_running: int) -> int:
        """From the start of an attempt to its first token. num_tokens: of the prompt, without those cached there.
        queued_ns: what the prompts before it still take.
        """
        waits_ns = queued_ns * self.queued_ppm // MILLION
        return self.first_ns + self.prefill_ns(num_tokens) + waits_ns + self.running_ns * num_running

    def token_interval_ps(self, num_running: int) -> int:
        """Between two tokens of one of so many answers that have begun there."""
        return self.token_ps + self.token_running_ps * max(num_running - 1, 0)


class BackendsCost(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag="backends"):
    """The servers of a replicaset, by number; beyond the last of them they come in turn again. seed: of all draws."""

    backends: Annotated[list[BackendCost], Meta(min_length=1)]
    seed: int = 0

    def of(self, number: int) -> BackendCost:
        """The server with this number in its replicaset."""
        return self.backends[number % len(self.backends)]

    def coefficients(self) -> list[int]:
        """Of the predictor that policies get: times to the first token of the first server, as if it were idle."""
        first = self.backends[0]
        return [first.first_ns * 1000, first.prefill_ps, 0, 0, 0]


#: What the steps of a replicaset's workers cost, or a model of the servers that its replicas are.
AnyCost = CostModel | BackendsCost


def describe_costs(names: Sequence[str], costs: Sequence[AnyCost]) -> dict[str, Any]:
    """The cost models of replicasets as the header of a simulated run has them, by their names if there are several."""
    if len(costs) == 1:
        return {"cost_model": to_builtins(costs[0])}
    return {"cost_models": {name: to_builtins(cost) for name, cost in zip(names, costs, strict=True)}}
