"""Fits models of other servers to the attempts of a recorded run.

Times to the first token and between tokens are linear functions of the load with coefficients that are not negative.
Relative errors count, and large ones no more than in proportion, so that a few stalls do not bend a model; what it
leaves becomes noise. A server with few answers has the model of all servers of its kind, or of all there are.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress, product
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, structs

from eventlm.errors import UsageError
from eventlm.events import Header
from eventlm.replay.cost.backend_model import BackendCost, BackendsCost, FailureRate
from eventlm.replay.cost.model import MILLION
from eventlm.replay.cost.recorded_forwards import ForwardCollector, RecordedForward

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

#: A server with fewer answers has the model of its kind.
MIN_ANSWERS = 30
#: Values that represent the distribution of the noise.
MAX_RATIOS = 128
#: Relative errors above so many medians of them count in proportion only.
LARGE_ERRORS = 3.0
_NUM_ROUNDS = 5
#: First values of what a token of a prompt takes, and how often those around the best are tried.
_NUM_GUESSES = 20
_NUM_REFINEMENTS = 3
#: Answers that stay together in a resample of the run.
_BLOCK_ANSWERS = 10


class ErrorsOfTimes(Struct, frozen=True):
    """Absolute relative errors of times that were held out from a fit."""

    mean: float
    median: float
    p95: float


class BackendsFit(Struct, frozen=True, kw_only=True):
    """How good the models are. first: of times to the first token; tokens: of the times between the first and the last
    one, None if no answer has two. num_pooled: servers with too few answers for models of their own.
    """

    num_answers: int
    num_servers: int
    num_pooled: int
    first: ErrorsOfTimes
    tokens: ErrorsOfTimes | None
    notes: list[str] = []


class FittedBackends(NamedTuple):
    """Models and their quality. draws: that of the run, then models of resamples of it."""

    draws: list[BackendsCost]
    report: BackendsFit

    @property
    def model(self) -> BackendsCost:
        """That of the run."""
        return self.draws[0]


def fit_backends(
    forwards: Sequence[RecordedForward], slots: Mapping[int, int], *, num_draws: int = 1
) -> FittedBackends:
    """Fit a model to each server of a replicaset, in the order of their replicas.

    slots: by replica, how many requests its server runs at once, if it has told. num_draws: how many models to
    return; all but the first are fitted to resamples. Raises UsageError if there is no answer.
    """
    answers = [each for each in forwards if _is_answer(each)]
    if not answers:
        raise UsageError("no answer of a backend is complete: there is nothing to fit a model of it to")
    replicas = range(max(each.replica for each in forwards) + 1)
    pools = {replica: _pool(forwards, replica) for replica in replicas}
    draws = []
    for draw in range(num_draws):
        models: dict[tuple[int, ...], BackendCost] = {}
        backends = []
        for replica in replicas:
            pool = pools[replica]
            if pool not in models:
                models[pool] = _fit(_of(forwards, pool), slots, draw)
            own = next((each for each in forwards if each.replica == replica), forwards[0])
            # Those of a pool may have told of different numbers of slots.
            named = structs.replace(models[pool], name=own.name, kind=own.kind, slots=slots.get(replica, 0))
            backends.append(named)
        draws.append(BackendsCost(backends=backends, seed=draw))
    first, tokens = _held_out(forwards, [*dict.fromkeys(pools.values())], slots)
    report = BackendsFit(
        num_answers=len(answers),
        num_servers=len({each.replica for each in forwards}),
        num_pooled=sum(len(pools[replica]) > 1 for replica in {each.replica for each in forwards}),
        first=first,
        tokens=tokens,
        notes=_notes(answers),
    )
    return FittedBackends(draws, report)


def forwards_of_sets(header: Header, collector: ForwardCollector) -> list[tuple[list[RecordedForward], dict[int, int]]]:
    """By replicaset: its attempts, and the slots that its servers told of, both by the number of the replica in its
    set.
    """
    found = []
    first = 0
    for record in header.sets:
        own = range(first, first + record.core.num_replicas)
        forwards = [
            structs.replace(each, replica=each.replica - first) for each in collector.forwards if each.replica in own
        ]
        found.append((forwards, {replica - first: n for replica, n in collector.slots.items() if replica in own}))
        first = own.stop
    return found


def _is_answer(forward: RecordedForward) -> bool:
    return forward.failure is None and forward.ended_ns >= 0


def _first_at(forward: RecordedForward) -> int:
    """When its first token came, or its end if it has none; -1: neither did."""
    return forward.first_ns if forward.first_ns >= 0 else forward.ended_ns if _is_answer(forward) else -1


def _of(forwards: Sequence[RecordedForward], replicas: tuple[int, ...]) -> list[RecordedForward]:
    return [each for each in forwards if each.replica in replicas]


def _pool(forwards: Sequence[RecordedForward], replica: int) -> tuple[int, ...]:
    """The servers whose attempts the model of one is fitted to."""
    kind = next((each.kind for each in forwards if each.replica == replica), "")
    every = tuple(sorted({each.replica for each in forwards}))
    same = tuple(sorted({each.replica for each in forwards if each.kind == kind}))
    wider = ((replica,), same, every)
    enough = (pool for pool in wider if sum(map(_is_answer, _of(forwards, pool))) >= MIN_ANSWERS)
    return next(enough, every)


def _fit(forwards: Sequence[RecordedForward], slots: Mapping[int, int], draw: int) -> BackendCost:
    """The model of servers that are alike; of draw 0 that of all attempts."""
    begins = _Begins(forwards, slots)
    coefficients = begins.fit(_resample(len(begins.rows), draw))
    first_ns, prefill_ns, queued, running_ns = coefficients
    goes_on = _GoesOn(forwards)
    of_tokens = goes_on.fit(_resample(len(goes_on.rows), draw))
    ends = [each.ended_ns - each.last_ns for each in forwards if _is_answer(each) and each.last_ns >= 0]
    return BackendCost(
        first_ns=round(first_ns),
        prefill_ps=round(prefill_ns * 1000),
        queued_ppm=round(queued * MILLION),
        running_ns=round(running_ns),
        token_ps=max(round(of_tokens[0] * 1000), 1),
        token_running_ps=round(of_tokens[1] * 1000),
        stall_ps=round(of_tokens[2] * 1000),
        end_ns=round(median(ends)) if ends else 0,
        first_ratios_ppm=_ratios(begins.wanted, begins.predict(coefficients)),
        token_ratios_ppm=_ratios(goes_on.wanted, goes_on.features @ of_tokens) if goes_on.rows else [],
        failures=_failures(forwards),
    )


class _Begins:
    """Times from the start of attempts to their first tokens. rows: those that did not wait for a slot, if any."""

    def __init__(self, forwards: Sequence[RecordedForward], slots: Mapping[int, int]) -> None:
        import numpy as np

        self.forwards = sorted(forwards, key=lambda each: each.sent_ns)
        begun = [row for row, each in enumerate(self.forwards) if _first_at(each) >= 0]
        free = [
            row for row in begun if not 0 < slots.get(self.forwards[row].replica, 0) <= self.forwards[row].num_ahead
        ]
        self.rows = free or begun
        of_rows = [self.forwards[row] for row in self.rows]
        self.wanted = np.array([max(_first_at(each) - each.sent_ns, 1) for each in of_rows], dtype=float)
        self._lengths = np.array([each.prompt_tokens for each in of_rows], dtype=float)
        self._running = np.array([each.num_running for each in of_rows], dtype=float)

    def _queued(self, prefill_ns: float) -> Floats:
        """[rows], ns that the prompts before each still take if each token takes so long and they form a line."""
        import numpy as np

        free_ns: dict[int, float] = {}
        found = []
        for each in self.forwards:
            waits_ns = max(free_ns.get(each.replica, 0.0) - each.sent_ns, 0.0)
            found.append(waits_ns)
            free_ns[each.replica] = each.sent_ns + waits_ns + prefill_ns * each.prompt_tokens
        return np.array(found)[self.rows]

    def fit(self, chosen: list[int]) -> Floats:
        """The coefficients: ns of each, ns of a token, the share of what is queued, ns of each answer that runs.

        How long a line is depends on what a token takes, and little more of that can make it much longer. So the best
        of many values is taken, each with the others that fit it.
        """
        import numpy as np

        has_prompt = self._lengths > 0
        if not has_prompt.any():
            return self._fit_rest(0.0, chosen)[1]
        ratios = self.wanted[has_prompt] / self._lengths[has_prompt]
        values = np.array([0.0, *np.geomspace(ratios.min() / 100, np.median(ratios), _NUM_GUESSES)])
        for _ in range(_NUM_REFINEMENTS):
            found = [self._fit_rest(float(value), chosen) for value in values]
            best = min(range(len(values)), key=lambda index: found[index][0])
            around = values[max(best - 1, 0)], values[min(best + 1, len(values) - 1)]
            values = np.array([values[best], *np.linspace(*around, 7)])
        return min((self._fit_rest(float(value), chosen) for value in values), key=lambda each: each[0])[1]

    def _fit_rest(self, prefill_ns: float, chosen: list[int]) -> tuple[float, Floats]:
        """The mean relative error and the coefficients where a token takes so long."""
        import numpy as np

        of_prompt, queued = prefill_ns * self._lengths, self._queued(prefill_ns)
        rest = np.column_stack([np.ones(len(self.rows)), queued, self._running])
        base_ns, share, running_ns = solve(rest[chosen], self.wanted[chosen], of_prompt[chosen])
        if share > 1:
            # A prompt waits for those before it once.
            share, given = 1.0, of_prompt + queued
            base_ns, running_ns = solve(rest[chosen][:, [0, 2]], self.wanted[chosen], given[chosen])
        found = np.array([base_ns, prefill_ns, share, running_ns])
        predicted = rest @ np.array([base_ns, share, running_ns]) + of_prompt
        return float(np.abs(predicted / self.wanted - 1)[chosen].mean()), found

    def predict(self, coefficients: Floats) -> Floats:
        """[rows], the times that a model gives."""
        base_ns, prefill_ns, share, running_ns = (float(value) for value in coefficients)
        found: Floats = base_ns + prefill_ns * self._lengths + share * self._queued(prefill_ns)
        return found + running_ns * self._running


class _GoesOn:
    """Times from the first tokens of answers to their last ones. rows: the answers that have any between."""

    def __init__(self, forwards: Sequence[RecordedForward]) -> None:
        import numpy as np

        self.rows = [each for each in forwards if each.num_tokens > each.num_first and each.last_ns > each.first_ns]
        self.wanted = np.array([each.last_ns - each.first_ns for each in self.rows], dtype=float)
        counts = np.array([each.num_tokens - each.num_first for each in self.rows], dtype=float)
        running = np.array([each.running_ns for each in self.rows], dtype=float)
        entered = np.array([each.entered_tokens for each in self.rows], dtype=float)
        others = np.maximum(running / np.maximum(self.wanted, 1.0) - 1, 0.0)
        #: [rows, 3]: tokens, tokens times the mean number of other answers, and tokens of prompts that came meanwhile.
        self.features = np.column_stack([counts, counts * others, entered])

    def fit(self, chosen: list[int]) -> Floats:
        """The coefficients, ns of each."""
        import numpy as np

        return solve(self.features[chosen], self.wanted[chosen]) if self.rows else np.zeros(3)


def solve(features: Floats, wanted: Floats, given: Floats | float = 0.0) -> Floats:
    """Coefficients that are not negative, by iteratively reweighted least squares of relative errors. given: what is
    there without them.
    """
    import numpy as np

    scales = np.maximum(np.abs(features).max(axis=0), 1e-9)
    scaled = features / scales
    weights = 1 / wanted
    for _ in range(_NUM_ROUNDS):
        found = _non_negative(scaled * weights[:, None], (wanted - given) * weights)
        predicted = np.maximum(scaled @ found + given, 1e-3 * float(np.median(wanted)))
        errors = np.abs(wanted / predicted - 1)
        large = LARGE_ERRORS * max(float(np.median(errors)), 1e-6)
        weights = np.sqrt(np.minimum(1.0, large / np.maximum(errors, 1e-9))) / predicted
    return np.asarray(found / scales)


def _non_negative(rows: Floats, wanted: Floats) -> Floats:
    """Least squares of `rows @ x = wanted`: the best of all sets of columns whose coefficients are not negative."""
    import numpy as np

    count = rows.shape[1]
    products, sides, rest = rows.T @ rows, rows.T @ wanted, float(wanted @ wanted)
    best, least = np.zeros(count), rest
    for kept in product([True, False], repeat=count):
        columns = list(compress(range(count), kept))
        if not columns:
            continue
        # Columns may say the same: then each has its part.
        values = np.linalg.lstsq(products[np.ix_(columns, columns)], sides[columns], rcond=1e-10)[0]
        error = rest - float(values @ sides[columns])
        if (values >= 0).all() and error < least - 1e-9 * rest:
            best, least = np.zeros(count), error
            best[columns] = values
    return best


def _resample(count: int, draw: int) -> list[int]:
    """Indices of answers: all of them for draw 0, else runs of neighbours drawn with replacement."""
    if not draw:
        return list(range(count))
    blocks = [range(first, min(first + _BLOCK_ANSWERS, count)) for first in range(0, count, _BLOCK_ANSWERS)]
    return [index for block in random.Random(f"{draw}").choices(blocks, k=len(blocks)) for index in block]


def _ratios(wanted: Floats, predicted: Floats) -> list[int]:
    """Quantiles of the measured times over those of the model, in parts per million, each weighted by the time of the
    model: what is little beside a long time is much beside a short one, and would be drawn for long ones too.
    """
    import numpy as np

    predicted = np.maximum(predicted, 1.0)
    ratios = wanted / predicted
    order = np.argsort(ratios)
    shares = np.cumsum(predicted[order]) - predicted[order] / 2
    count = min(len(ratios), MAX_RATIOS)
    middles = (np.arange(count) + 0.5) / count * predicted.sum()
    values = np.interp(middles, shares, ratios[order])
    return [max(round(float(value) * MILLION), 1) for value in values]


def _failures(forwards: Sequence[RecordedForward]) -> list[FailureRate]:
    """How often each kind of failure came, the most frequent first."""
    ended = sum(each.ended_ns >= 0 for each in forwards)
    failed = [(each, each.failure) for each in forwards if each.failure is not None]
    found = []
    for kind, count in Counter(failure.kind for _, failure in failed).most_common():
        own = [(each, failure) for each, failure in failed if failure.kind == kind]
        begun = [failure.can_continue for each, failure in own if each.first_ns >= 0]
        delays = [each.ended_ns - each.sent_ns for each, _ in own if each.first_ns < 0]
        found.append(
            FailureRate(
                kind=kind,
                rate_ppm=count * MILLION // ended,
                delay_ns=round(median(delays)) if delays else 0,
                begun_ppm=len(begun) * MILLION // count,
                status=Counter(failure.status for _, failure in own).most_common(1)[0][0],
                retry_after_ns=round(median([failure.retry_after_ns for _, failure in own])),
                can_continue=2 * sum(begun) > len(begun),
            )
        )
    return found


def _held_out(
    forwards: Sequence[RecordedForward], pools: Sequence[tuple[int, ...]], slots: Mapping[int, int]
) -> tuple[ErrorsOfTimes, ErrorsOfTimes | None]:
    """The errors of every other answer by a fit to those between them."""
    import numpy as np

    errors_first: list[Floats] = []
    errors_tokens: list[Floats] = []
    for pool in pools:
        begins, goes_on = _Begins(_of(forwards, pool), slots), _GoesOn(_of(forwards, pool))
        for half in range(2):
            others = [row for row in range(len(begins.rows)) if row % 2 != half] or [0]
            held = np.arange(len(begins.rows)) % 2 == half
            predicted = begins.predict(begins.fit(others))
            errors_first.append(np.abs(predicted / begins.wanted - 1)[held])
            others = [row for row in range(len(goes_on.rows)) if row % 2 != half]
            if others:
                held = np.arange(len(goes_on.rows)) % 2 == half
                predicted = goes_on.features @ goes_on.fit(others)
                errors_tokens.append(np.abs(predicted / goes_on.wanted - 1)[held])
    tokens = [each for each in errors_tokens if len(each)]
    return _errors(errors_first), _errors(tokens) if tokens else None


def _errors(parts: Sequence[Floats]) -> ErrorsOfTimes:
    import numpy as np

    errors = np.concatenate(parts)
    return ErrorsOfTimes(float(errors.mean()), float(np.median(errors)), float(np.quantile(errors, 0.95)))


def _notes(answers: Sequence[RecordedForward]) -> list[str]:
    """How well the core knows what the servers' caches hold, where they tell."""
    told = [each for each in answers if each.told_tokens > 0 and each.told_cached >= 0]
    if not told:
        return ["the backends do not tell what their caches held: hits are those of the scheduler's own model"]
    by_backends = sum(each.told_cached for each in told) / sum(each.told_tokens for each in told)
    by_core = 1 - sum(each.prompt_tokens for each in told) / max(sum(each.all_tokens for each in told), 1)
    return [
        f"the backends found {by_backends:.0%} of the prompts' tokens in their caches, and the scheduler took them to "
        f"find {by_core:.0%}"
    ]
