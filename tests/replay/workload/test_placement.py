"""Requests of a workload find their replicasets."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.config import CoreConfig
from eventlm.errors import UsageError
from eventlm.replay.workload.placement import place_requests
from eventlm.replay.workload.workload import Workload
from tests.replay.what_if_runs import requests_of

SETS = {"big": ["big-model"], "small": ["org/small"]}
CORE = CoreConfig(models=["m"], num_blocks=8, max_model_len=100)


def named(*models: str, group_size: int = 1) -> Workload:
    """Requests for these models."""
    workload = requests_of([0] * len(models))
    requests = [
        structs.replace(
            each,
            arrival=structs.replace(
                each.arrival,
                scheduling=structs.replace(each.arrival.scheduling, model=model),
                group_size=group_size,
                group_index=index % group_size,
            ),
        )
        for index, (each, model) in enumerate(zip(workload.requests, models, strict=True))
    ]
    return structs.replace(workload, requests=requests)


def numbers(workload: Workload) -> list[int]:
    return [each.arrival.replicaset for each in workload.requests]


def test_requests_go_by_model_and_those_without_to_the_first() -> None:
    placed = place_requests(named("small", "", "big", "org/small", "big-model"), SETS)
    assert numbers(placed) == [1, 0, 0, 1, 0]
    assert placed.requests[0].arrival.scheduling.model == "small"


def test_one_replicaset_takes_them_all() -> None:
    assert numbers(place_requests(place_requests(named("small", "big"), SETS), {"main": ["any"]})) == [0, 0]


def test_those_of_a_run_stay_with_the_set_of_the_name() -> None:
    """However the model is called now."""
    workload = place_requests(named("small", "big", "org/small"), SETS)
    workload = structs.replace(workload, recorded={"b": CORE, "s": CORE})
    assert numbers(place_requests(workload, {"s": ["x"], "b": ["y"]})) == [0, 1, 0]


def test_a_served_model_goes_before_a_set_and_a_set_before_other_names_of_a_model() -> None:
    workload = named("a", "b", "c")
    assert numbers(place_requests(workload, {"a": ["b", "c"], "b": ["a"], "c": ["d"]})) == [1, 0, 2]
    # Those of a run know their set.
    workload = structs.replace(workload, recorded={"a": CORE, "b": CORE})
    assert numbers(place_requests(workload, {"a": ["b", "c"], "b": ["a"], "c": ["d"]})) == [0, 0, 0]


def test_a_model_that_nobody_has_is_named() -> None:
    with pytest.raises(
        UsageError, match="request 1 is for the model 'smal', and the replicasets go by big, small, big-model,"
    ):
        place_requests(named("small", "smal"), SETS)


def test_a_group_goes_to_one() -> None:
    assert numbers(place_requests(named("small", "small", group_size=2), SETS)) == [1, 1]
    with pytest.raises(UsageError, match="request 0 and others of its group name models of several"):
        place_requests(named("small", "big", group_size=2), SETS)
