"""What steps cost in a what-if: of each replicaset a model that was given, or one fitted to its part of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, structs

from eventlm.config import CoreConfig
from eventlm.core.predictor import StepShape
from eventlm.core.recorded_layouts import recorded_layouts
from eventlm.errors import UsageError
from eventlm.events import Header
from eventlm.replay.cost.backend_model import AnyCost, BackendsCost
from eventlm.replay.cost.fit import FitReport, fit_cost
from eventlm.replay.cost.fit_backends import BackendsFit, fit_backends, forwards_of_sets
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.cost.recorded_forwards import RecordedForward
from eventlm.replay.cost.recorded_steps import RecordedShapes, RecordedStep
from eventlm.replay.cost.roofline import RooflineCost
from eventlm.replay.rebuild import check_set_names
from eventlm.replay.workload.recorded_run import RecordedRun
from eventlm.replay.workload.unknown import has_unknown

#: How many times what the run does not show is drawn. An odd number has a middle one.
NUM_DRAWS = 5


#: How good a fitted cost model is.
Fit = FitReport | BackendsFit


def given_costs(header: Header, of_all: AnyCost | None, of_sets: Mapping[str, AnyCost]) -> list[AnyCost | None]:
    """The cost model that was given for each replicaset, if any. Raises UsageError for a set that the run lacks, and
    for a model of the wrong kind.
    """
    check_set_names(header, of_sets)
    found = [of_sets.get(each.name, of_all) for each in header.sets]
    for record, cost in zip(header.sets, found, strict=True):
        forwards = record.core.forwards is not UNSET
        if cost is not None and forwards != isinstance(cost, BackendsCost):
            has, needs = ("backends", "one of backends") if forwards else ("workers", "one of steps")
            raise UsageError(f"the replicaset {record.name} has {has}: its cost model must be {needs}")
    return found


def draw_costs(
    run: RecordedRun, given: Sequence[AnyCost | None], *, follows_run: bool
) -> tuple[list[list[AnyCost]], list[Fit | None]]:
    """By draw, the cost model of each replicaset: the one that was given for it, else one fitted to its steps; and how
    good the fitted ones are. One draw shows everything if nothing is unknown and nothing is left to chance.

    Raises UsageError for a replicaset that has requests and no step or answer to fit a model to.
    """
    of_sets: list[Sequence[AnyCost]] = []
    fits: list[Fit | None] = []
    tensor = [layout.tensor for layout in recorded_layouts(run.header)]
    first = 0
    forwards = forwards_of_sets(run.header, run.forwards)
    for index, (record, cost, steps) in enumerate(zip(run.header.sets, given, run.steps_of_sets(), strict=True)):
        fit: Fit | None = None
        if cost is None and not steps and not _has_requests(run, index):
            # Nothing will run there.
            cost = LinearCost(base_ps=0, groups=record.core.groups)
        if cost is None:
            try:
                draws, fit = _fit(record.core, steps, forwards[index], follows_run=follows_run)
            except UsageError as error:
                whose = f"replicaset {record.name}: " if len(given) > 1 else ""
                raise UsageError(f"{whose}{error}") from error
            of_sets.append(draws)
        else:
            of_sets.append(_draws_of(run, cost, record.core, tensor[first]))
        fits.append(fit)
        first += record.core.num_replicas
    num_draws = max(map(len, of_sets))
    # Of a set without draws of its own, the same each time.
    return [[draws[draw % len(draws)] for draws in of_sets] for draw in range(num_draws)], fits


def _fit(
    core: CoreConfig,
    steps: Sequence[RecordedStep],
    forwards: tuple[Sequence[RecordedForward], Mapping[int, int]],
    *,
    follows_run: bool,
) -> tuple[Sequence[AnyCost], Fit]:
    """The draws of the model of a replicaset, and how good it is."""
    if core.forwards is not UNSET:
        of_backends = fit_backends(*forwards, num_draws=NUM_DRAWS)
        return of_backends.draws, of_backends.report
    of_steps = fit_cost(steps, follows_run=follows_run, num_draws=NUM_DRAWS, num_groups=core.groups)
    return of_steps.draws, of_steps.report


def _has_requests(run: RecordedRun, index: int) -> bool:
    return any(request.arrival.replicaset == index for request in run.all_work.requests)


def _draws_of(run: RecordedRun, given: AnyCost, core: CoreConfig, tensor: int) -> Sequence[AnyCost]:
    if isinstance(given, BackendsCost):
        return [structs.replace(given, seed=given.seed + draw) for draw in range(NUM_DRAWS)]
    if isinstance(given, LinearCost):
        num_draws = NUM_DRAWS if given.ratios_ppm or has_unknown(run.workload) else 1
        # A user who gives one for a run means the groups of that run.
        return [structs.replace(given, seed=given.seed + draw, groups=core.groups) for draw in range(num_draws)]
    if isinstance(given, RooflineCost):
        # The core does not know of tensor ranks.
        given = given.in_ranks(tensor, core.stages, core.groups)
    return [given] * (NUM_DRAWS if has_unknown(run.workload) else 1)


def shapes_of_sets(run: RecordedRun) -> list[RecordedShapes]:
    """Those of the steps of each replicaset, or of the attempts at its servers."""
    return [
        RecordedShapes([*(step.shape for step in steps), *(each.shape for each in forwards)])
        for steps, (forwards, _) in zip(run.steps_of_sets(), forwards_of_sets(run.header, run.forwards), strict=True)
    ]


class LooksAtShapes:
    """Counts steps of a simulation, and attempts at other servers, and those that are unlike all that the run has of
    their replicaset.
    """

    def __init__(self, header: Header, shapes: Sequence[RecordedShapes]) -> None:
        self.num_seen = self.num_outside = 0
        self._shapes = [shapes[index] for index in header.sets_of_replicas()]

    def look(self, replica: int, shape: StepShape) -> None:
        """Take the next step, or attempt."""
        self.num_seen += 1
        self.num_outside += not self._shapes[replica].is_inside(shape)
