"""What steps cost in a what-if: of each replicaset a model that was given, or one fitted to its part of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from eventlm.config import CoreConfig
from eventlm.core.predictor import StepShape
from eventlm.core.recorded_layouts import recorded_layouts
from eventlm.errors import UsageError
from eventlm.events import Header
from eventlm.replay.cost.fit import FitReport, fit_cost
from eventlm.replay.cost.model import CostModel, LinearCost
from eventlm.replay.cost.recorded_steps import RecordedShapes
from eventlm.replay.cost.roofline import RooflineCost
from eventlm.replay.rebuild import check_set_names
from eventlm.replay.workload.recorded_run import RecordedRun
from eventlm.replay.workload.unknown import has_unknown

#: How many times what the run does not show is drawn. An odd number has a middle one.
NUM_DRAWS = 5


def given_costs(header: Header, of_all: CostModel | None, of_sets: Mapping[str, CostModel]) -> list[CostModel | None]:
    """The cost model that was given for each replicaset, if any. Raises UsageError for a set that the run lacks."""
    check_set_names(header, of_sets)
    return [of_sets.get(each.name, of_all) for each in header.sets]


def draw_costs(
    run: RecordedRun, given: Sequence[CostModel | None], *, follows_run: bool
) -> tuple[list[list[CostModel]], list[FitReport | None]]:
    """By draw, the cost model of each replicaset: the one that was given for it, else one fitted to its steps; and how
    good the fitted ones are. One draw shows everything if nothing is unknown and nothing is left to chance.

    Raises UsageError for a replicaset that has requests and no step to fit a model to.
    """
    of_sets: list[Sequence[CostModel]] = []
    fits: list[FitReport | None] = []
    tensor = [layout.tensor for layout in recorded_layouts(run.header)]
    first = 0
    for index, (record, cost, steps) in enumerate(zip(run.header.sets, given, run.steps_of_sets(), strict=True)):
        fit = None
        if cost is None and not steps and not _has_requests(run, index):
            # Nothing will run there.
            cost = LinearCost(base_ps=0, groups=record.core.groups)
        if cost is None:
            try:
                fitted = fit_cost(steps, follows_run=follows_run, num_draws=NUM_DRAWS, num_groups=record.core.groups)
            except UsageError as error:
                whose = f"replicaset {record.name}: " if len(given) > 1 else ""
                raise UsageError(f"{whose}{error}") from error
            fit = fitted.report
            of_sets.append(fitted.draws)
        else:
            of_sets.append(_draws_of(run, cost, record.core, tensor[first]))
        fits.append(fit)
        first += record.core.num_replicas
    num_draws = max(map(len, of_sets))
    # Of a set without draws of its own, the same each time.
    return [[draws[draw % len(draws)] for draws in of_sets] for draw in range(num_draws)], fits


def _has_requests(run: RecordedRun, index: int) -> bool:
    return any(request.arrival.replicaset == index for request in run.all_work.requests)


def _draws_of(run: RecordedRun, given: CostModel, core: CoreConfig, tensor: int) -> Sequence[CostModel]:
    if isinstance(given, LinearCost):
        num_draws = NUM_DRAWS if given.ratios_ppm or has_unknown(run.workload) else 1
        # A user who gives one for a run means the groups of that run.
        return [structs.replace(given, seed=given.seed + draw, groups=core.groups) for draw in range(num_draws)]
    if isinstance(given, RooflineCost):
        # The core does not know of tensor ranks.
        given = given.in_ranks(tensor, core.stages, core.groups)
    return [given] * (NUM_DRAWS if has_unknown(run.workload) else 1)


def shapes_of_sets(run: RecordedRun) -> list[RecordedShapes]:
    """Those of the steps of each replicaset."""
    return [RecordedShapes(step.shape for step in steps) for steps in run.steps_of_sets()]


class LooksAtShapes:
    """Counts steps of a simulation that are unlike those that the run has of their replicaset."""

    def __init__(self, header: Header, shapes: Sequence[RecordedShapes]) -> None:
        self.num_outside = 0
        self._shapes = [shapes[index] for index in header.sets_of_replicas()]

    def look(self, replica: int, shape: StepShape) -> None:
        """Take the next step."""
        self.num_outside += not self._shapes[replica].is_inside(shape)
