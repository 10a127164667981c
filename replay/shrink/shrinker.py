"""Makes a workload smaller in passes while a condition holds: fewer requests, shorter ones, plainer ones.

    windows          half the time, and half of that; then what is before and behind
    conversations    requests that follow each other or arrive as one go together
    requests         delta debugging over single requests
    incidents        likewise
    lengths          prompts and outputs: of all together, then of each
    times            gaps between arrivals
    features         what requests can do without
    limits           of the engine, if asked for

What a later pass simplifies may make a request superfluous, so passes repeat until a round changes nothing; the last
thing tried is then to leave out each request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from eventlm.errors import UsageError
from eventlm.replay.predicate.oracle import BudgetSpentError, Oracle, Variant
from eventlm.replay.shrink.features import FEATURES, output_tokens, with_output, with_prompt
from eventlm.replay.shrink.minimize import OnDemand, least_number, minimize_list, without_each
from eventlm.replay.shrink.parts import conversations, keep_requests
from eventlm.replay.workload.workload import Workload, WorkloadRequest
from eventlm.types import NANOSECONDS_PER_MILLISECOND

#: What a gap between arrivals is rounded down to, if it cannot close.
_ROUND_NS = tuple(unit * NANOSECONDS_PER_MILLISECOND for unit in (60_000, 10_000, 1000, 100, 10, 1))
#: The ends of a window are found to one part in so many; the passes after it do the rest.
_WINDOW_PARTS = 16
#: Limits that `--engine` lowers, with the smallest value of each.
_LIMITS = {"replicas": 1, "num_blocks": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_steps_in_flight": 1}


class PassReport(Struct, frozen=True, kw_only=True):
    """What a pass left, and how many simulations it took."""

    name: str
    num_requests: int
    prompt_tokens: int
    num_trials: int


class ShrinkResult(Struct, frozen=True, kw_only=True):
    """The smallest workload found and the engine's options.

    is_minimal: no single request can go. stopped: why not everything was tried, else "".
    """

    workload: Workload
    options: dict[str, Any]
    passes: list[PassReport]
    num_trials: int
    is_minimal: bool
    stopped: str
    wall_ns: int


def shrink(
    oracle: Oracle,
    workload: Workload,
    options: dict[str, Any],
    *,
    with_limits: bool = False,
    on_pass: Callable[[PassReport], None] | None = None,
) -> ShrinkResult:
    """Make a workload smaller. with_limits: the engine's limits too.

    Stops early, with what it has, when the oracle's budget is spent or on an interrupt. Raises UsageError if the
    condition does not hold at the start, and BudgetSpentError if that is not known in time.
    """
    began_ns = time.monotonic_ns()
    started = Variant(workload, options)
    try:
        result = oracle.result(started)
    except BudgetSpentError as error:
        raise error.before("the whole workload was simulated once") from None
    if result.error:
        raise UsageError(f"the whole workload cannot be simulated: {result.error}")
    if not result.holds:
        figures = ", ".join(f"{name} is {value}" for name, value in oracle.figures(started).items())
        raise UsageError(
            f"--keep {oracle.condition!r} does not hold for the whole workload, so there is nothing to keep"
            + (f": {figures}" if figures else "")
        )
    shrinker = _Shrinker(oracle, started, on_pass)
    stopped = ""
    try:
        shrinker.run(with_limits=with_limits)
    except BudgetSpentError as error:
        stopped = str(error)
    except KeyboardInterrupt:
        stopped = "interrupted"
    return ShrinkResult(
        workload=shrinker.current.workload,
        options=shrinker.current.options,
        passes=shrinker.passes,
        num_trials=oracle.num_trials,
        is_minimal=shrinker.is_minimal,
        stopped=stopped,
        wall_ns=time.monotonic_ns() - began_ns,
    )


class _Shrinker:
    """current: the smallest variant so far that keeps the condition."""

    def __init__(self, oracle: Oracle, started: Variant, on_pass: Callable[[PassReport], None] | None) -> None:
        self.current = started
        self.passes: list[PassReport] = []
        self.is_minimal = False
        self._oracle = oracle
        self._on_pass = on_pass

    @property
    def _requests(self) -> list[WorkloadRequest]:
        return self.current.workload.requests

    def run(self, *, with_limits: bool) -> None:
        self._pass("windows", self._windows)
        self._pass("conversations", self._conversations)
        self._pass("requests", self._fewer_requests)
        while True:
            before = self.current
            self.is_minimal = False
            self._pass("incidents", self._incidents)
            self._pass("lengths", self._lengths)
            self._pass("times", self._times)
            self._pass("features", self._features)
            if with_limits:
                self._pass("limits", self._limits)
            self._pass("each request", self._each_request)
            self.is_minimal = True
            if self.current == before:
                break

    def _pass(self, name: str, run: Callable[[], None]) -> None:
        num_before = self._oracle.num_trials
        run()
        report = PassReport(
            name=name,
            num_requests=len(self._requests),
            prompt_tokens=sum(request.arrival.prompt_tokens for request in self._requests),
            num_trials=self._oracle.num_trials - num_before,
        )
        self.passes.append(report)
        if self._on_pass is not None:
            self._on_pass(report)

    def _try(self, variant: Variant) -> bool:
        """Go on with a variant if it keeps the condition; one that is no other is not tried."""
        if variant == self.current:
            return False
        if not self._oracle.holds(variant):
            return False
        self.current = variant
        return True

    def _try_first(self, variants: list[Variant]) -> bool:
        """The same with the first of some."""
        kept = self._oracle.first(variants)
        if kept is not None:
            self.current = variants[kept]
        return kept is not None

    def _with_workload(self, workload: Workload) -> Variant:
        return Variant(workload, self.current.options)

    def _with_request(self, index: int, request: WorkloadRequest) -> Variant:
        requests = [*self._requests[:index], request, *self._requests[index + 1 :]]
        return self._with_workload(structs.replace(self.current.workload, requests=requests))

    def _with_requests(self, requests: list[WorkloadRequest]) -> Variant:
        return self._with_workload(structs.replace(self.current.workload, requests=requests))

    def _windows(self) -> None:
        """A half as long as one will do: a window costs what it is long, so this is cheap. Then the ends, roughly."""
        whole = self.current.workload
        low, high = 0, len(whole.requests)
        while high - low > 1:
            half, quarter = (high - low + 1) // 2, (high - low) // 4
            # What is shorter than a quarter lies in one of them.
            windows = [(first, first + half) for first in dict.fromkeys((low, high - half, low + quarter))]
            kept = self._oracle.first([self._window(whole, *window) for window in windows])
            if kept is None:
                break
            low, high = windows[kept]
            self.current = self._window(whole, low, high)
        within = max((high - low) // _WINDOW_PARTS, 1)
        high = least_number(low + 1, high, lambda end: self._keeps(whole, low, end), within=within)
        size = least_number(1, high - low, lambda size: self._keeps(whole, high - size, high), within=within)
        self.current = self._window(whole, high - size, high)

    def _window(self, whole: Workload, low: int, high: int) -> Variant:
        return self._with_workload(keep_requests(whole, range(low, high)))

    def _keeps(self, whole: Workload, low: int, high: int) -> bool:
        return self._oracle.holds(self._window(whole, low, high))

    def _conversations(self) -> None:
        units = conversations(self.current.workload)
        if len(units) < len(self._requests):
            self._reduce_requests(units, minimize_list)

    def _fewer_requests(self) -> None:
        self._reduce_requests([[index] for index in range(len(self._requests))], minimize_list)

    def _each_request(self) -> None:
        self._reduce_requests([[index] for index in range(len(self._requests))], without_each)

    def _reduce_requests(
        self,
        units: list[list[int]],
        reduce: Callable[[list[list[int]], Callable[[OnDemand[list[list[int]]]], int | None]], list[list[int]]],
    ) -> None:
        whole = self.current.workload

        def variant(kept: list[list[int]]) -> Variant:
            indices = sorted(index for unit in kept for index in unit)
            return self._with_workload(keep_requests(whole, indices))

        def first_kept(lists: OnDemand[list[list[int]]]) -> int | None:
            kept = self._oracle.first(OnDemand(len(lists), lambda index: variant(lists[index])))
            if kept is not None:
                # If the budget ends in the middle of a pass, this is not lost.
                self.current = variant(lists[kept])
            return kept

        reduce(units, first_kept)

    def _incidents(self) -> None:
        whole = self.current.workload
        if not whole.incidents or self._try(self._with_workload(structs.replace(whole, incidents=[]))):
            return

        def first_kept(lists: OnDemand[list[Any]]) -> int | None:
            def variant(index: int) -> Variant:
                return self._with_workload(structs.replace(whole, incidents=lists[index]))

            kept = self._oracle.first(OnDemand(len(lists), variant))
            if kept is not None:
                self.current = variant(kept)
            return kept

        minimize_list(whole.incidents, first_kept)

    def _lengths(self) -> None:
        block_size = self.current.workload.block_size

        def shorten(request: WorkloadRequest, num_tokens: int) -> WorkloadRequest:
            return with_prompt(request, num_tokens, block_size=block_size)

        self._shorten(lambda request: request.arrival.prompt_tokens, shorten)
        self._shorten(output_tokens, with_output)

    def _shorten(
        self,
        length: Callable[[WorkloadRequest], int],
        shorten: Callable[[WorkloadRequest, int], WorkloadRequest],
    ) -> None:
        """Halve all lengths as long as that goes, then find the least of each, the longest first."""
        while True:
            halves = [shorten(each, max(length(each) // 2, 1)) if length(each) > 1 else each for each in self._requests]
            if not self._try(self._with_requests(halves)):
                break
        for index in sorted(range(len(self._requests)), key=lambda each: -length(self._requests[each])):
            request = self._requests[index]
            if length(request) > 1:
                least = least_number(1, length(request), self._holds_with(index, request, shorten))
                self._try(self._with_request(index, shorten(request, least)))

    def _holds_with(
        self, index: int, request: WorkloadRequest, change: Callable[[WorkloadRequest, int], WorkloadRequest]
    ) -> Callable[[int], bool]:
        return lambda number: self._oracle.holds(self._with_request(index, change(request, number)))

    def _times(self) -> None:
        """Begin at 0, all at once if that goes, else with each gap closed or rounded down."""
        workload = self.current.workload
        first_ns = min([workload.requests[0].arrival_ns, *(fact.ts for fact in workload.incidents)])
        shifted = structs.replace(
            workload,
            requests=[structs.replace(each, arrival_ns=each.arrival_ns - first_ns) for each in workload.requests],
            incidents=[structs.replace(fact, ts=fact.ts - first_ns) for fact in workload.incidents],
        )
        self._try(self._with_workload(shifted))
        if self._try(self._with_requests([structs.replace(each, arrival_ns=0) for each in self._requests])):
            return
        for index in range(len(self._requests)):
            before_ns = self._requests[index - 1].arrival_ns if index else 0
            gap_ns = self._requests[index].arrival_ns - before_ns
            rounded = [0, *(gap_ns // unit * unit for unit in _ROUND_NS)]
            self._try_first([self._with_gap(index, gap_ns, each) for each in dict.fromkeys(rounded) if each < gap_ns])

    def _with_gap(self, index: int, gap_ns: int, new_ns: int) -> Variant:
        """All requests from `index` on come earlier."""
        later = [structs.replace(each, arrival_ns=each.arrival_ns - gap_ns + new_ns) for each in self._requests[index:]]
        return self._with_requests([*self._requests[:index], *later])

    def _features(self) -> None:
        for simplify in FEATURES.values():
            if self._try(self._with_requests([simplify(each) for each in self._requests])):
                continue
            for index, request in enumerate(self._requests):
                self._try(self._with_request(index, simplify(request)))

    def _limits(self) -> None:
        for name, least in _LIMITS.items():
            now = self.current.options.get(name)
            if name == "max_num_batched_tokens":
                least = self.current.options.get("max_num_seqs", least)
            if now is not None and now > least:
                found = least_number(least, now, self._holds_with_limit(name))
                self._try(self.current.with_option(name, found))

    def _holds_with_limit(self, name: str) -> Callable[[int], bool]:
        return lambda value: self._oracle.holds(self.current.with_option(name, value))
