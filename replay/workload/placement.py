"""Which replicaset of an engine serves each request of a workload: requests go by the model that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from eventlm.errors import UsageError
from eventlm.replay.workload.workload import Workload, WorkloadRequest


def place_requests(workload: Workload, models: Mapping[str, Sequence[str]]) -> Workload:
    """The workload for an engine with replicasets of these names, in order, and what their models go by: first what
    they are served as.

    Where there is one, it serves all requests. Those of a run with several go to the set of the same name, others to
    the one that has their model, and those that name none to the first. A name that several go by is first that of a
    served model, as on the server, and then that of a set. Raises UsageError for a model that no set has,
    and for a group whose members would go to several.
    """
    if len(models) == 1:
        numbers = [0] * len(workload.requests)
    else:
        numbers = _numbers(workload, models)
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


def _numbers(workload: Workload, models: Mapping[str, Sequence[str]]) -> list[int]:
    number_of_set = {name: number for number, name in enumerate(models)}
    # Two that serve one name are refused elsewhere.
    number_of = number_of_set | {served: number for number, (served, *_) in enumerate(models.values())}
    for number, own in enumerate(models.values()):
        for model in own:
            number_of.setdefault(model, number)
    # The sets of a run with several, in its order; None: it is not there.
    recorded = [number_of_set.get(name) for name in workload.recorded] if len(workload.recorded) > 1 else []
    return [_number(workload, index, request, recorded, number_of) for index, request in enumerate(workload.requests)]


def _number(
    workload: Workload,
    index: int,
    request: WorkloadRequest,
    recorded: Sequence[int | None],
    number_of: Mapping[str, int],
) -> int:
    model, before = request.arrival.scheduling.model, request.arrival.replicaset
    if before < len(recorded) and (number := recorded[before]) is not None:
        return number
    if not model:
        return 0
    if model not in number_of:
        raise UsageError(
            f"{workload.source}: request {index} is for the model {model!r}, and the replicasets go by "
            f"{', '.join(number_of)}; give one that served_model_name, or change the workload"
        )
    return number_of[model]
