"""Requests and arrivals from flat keyword arguments, for tests: each field goes into the struct that defines it."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import structs

from eventlm.engine.request import Request
from eventlm.events import Arrived
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams

SCHEDULING_FIELDS = {field.name for field in structs.fields(SchedulingParams)}
_Made = TypeVar("_Made", Arrived, Request)


def make_arrival(**fields: Any) -> Arrived:
    """An arrival of a short prompt, with these fields of it and of its `scheduling`."""
    scheduling = _scheduling(fields)
    return Arrived(**{"prompt_tokens": 4, "max_tokens": 4} | fields, scheduling=scheduling)


def make_request(prompt_token_ids: list[int], sampling: SamplingParams, **fields: Any) -> Request:
    """A request with these fields of it and of its `scheduling`."""
    scheduling = _scheduling(fields)
    return Request(prompt_token_ids=prompt_token_ids, sampling=sampling, scheduling=scheduling, **fields)


def changed(made: _Made, **changes: Any) -> _Made:
    """A request or an arrival with other values of these fields of it and of its `scheduling`."""
    scheduling = {name: changes.pop(name) for name in SCHEDULING_FIELDS & changes.keys()}
    return structs.replace(made, scheduling=structs.replace(made.scheduling, **scheduling), **changes)


def _scheduling(fields: dict[str, Any]) -> SchedulingParams:
    """Take the fields of a SchedulingParams out of `fields`."""
    return SchedulingParams(**{"model": "m"} | {name: fields.pop(name) for name in SCHEDULING_FIELDS & fields.keys()})
