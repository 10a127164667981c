"""Which replicaset of an engine serves each request of a workload: requests go by the model that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from eventlm.errors import UsageError
from eventlm.replay.workload.workload import Workload, WorkloadRequest


def place_requests(workload: Workload, names: Sequence[Sequence[str]]) -> Workload:
    """The workload for an engine whose replicasets, in order, go by these names of models.

    Where there is one, it serves all requests. Those of a run with several go to the set of the same name, others to
    the one that has their model, and those that name none to the first. Raises UsageError for a model that no set has,
    and for a group whose members would go to several.
    """
    if len(names) == 1:
        numbers = [0] * len(workload.requests)
    else:
        numbers = _numbers(workload, names)
    for group in workload.groups():
        if len({numbers[index] for index in group}) > 1:
            raise UsageError(
                f"{workload.source}: request {group.start} and others of its group name models of several replicasets, "
                "and a group goes to one"
            )
    requests = [
        request
        if request.arrival.replicaset == number
        else structs.replace(request, arrival=structs.replace(request.arrival, replicaset=number))
        for request, number in zip(workload.requests, numbers, strict=True)
    ]
    return structs.replace(workload, requests=requests)


def _numbers(workload: Workload, names: Sequence[Sequence[str]]) -> list[int]:
    number_of: dict[str, int] = {}
    for number, own in enumerate(names):
        for name in own:
            number_of.setdefault(name, number)
    recorded = [*workload.recorded] if len(workload.recorded) > 1 else []
    return [_number(workload, index, request, recorded, number_of) for index, request in enumerate(workload.requests)]


def _number(
    workload: Workload, index: int, request: WorkloadRequest, recorded: Sequence[str], number_of: Mapping[str, int]
) -> int:
    model, before = request.arrival.scheduling.model, request.arrival.replicaset
    if before < len(recorded) and recorded[before] in number_of:
        return number_of[recorded[before]]
    if not model:
        return 0
    if model not in number_of:
        raise UsageError(
            f"{workload.source}: request {index} is for the model {model!r}, and the replicasets go by "
            f"{', '.join(number_of)}; give one that served_model_name, or change the workload"
        )
    return number_of[model]
