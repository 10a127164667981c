"""What an operator can ask of the backends of a running engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from eventlm.config.backends import BackendSpec
from eventlm.core.state.core_state import CoreState
from eventlm.engine.backends.backend_set import BackendSet, BackendStatus, UnknownBackendError
from eventlm.errors import UsageError


class ListBackends(Struct, frozen=True, tag="list_backends"):
    """Change nothing."""


class AddBackend(Struct, frozen=True, kw_only=True, tag="add_backend"):
    """Take one in. model: of the replicaset, empty if only one has backends."""

    spec: BackendSpec
    model: str = ""

    @property
    def name(self) -> str:
        """As `BackendSpec.name`."""
        return self.spec.name


class RemoveBackend(Struct, frozen=True, kw_only=True, tag="remove_backend"):
    """Let one go once it has answered what it has. model: empty if one set alone has a backend of this name."""

    name: str
    model: str = ""


class DrainBackend(Struct, frozen=True, kw_only=True, tag="drain_backend"):
    """Send one nothing more. What it has goes on."""

    name: str
    model: str = ""


class ResumeBackend(Struct, frozen=True, kw_only=True, tag="resume_backend"):
    """The end of that."""

    name: str
    model: str = ""


BackendAction = ListBackends | AddBackend | RemoveBackend | DrainBackend | ResumeBackend


async def carry_out(action: BackendAction, sets: Mapping[str, BackendSet]) -> None:
    """Do what is asked. sets: by each name of their models. Raises UnknownBackendError, or UsageError for what cannot
    be done.
    """
    match action:
        case AddBackend(spec=spec, model=model):
            await _set_of(model, sets).add(spec)
        case RemoveBackend(name=name, model=model):
            _set_with(name, model, sets).remove(name)
        case DrainBackend(name=name, model=model):
            _set_with(name, model, sets).drain(name, drains=True)
        case ResumeBackend(name=name, model=model):
            _set_with(name, model, sets).drain(name, drains=False)


def list_backends(sets: Mapping[str, BackendSet], state: CoreState) -> list[BackendStatus]:
    """Of all sets."""
    return [status for each in _distinct(sets) for status in each.status(state)]


def _set_of(model: str, sets: Mapping[str, BackendSet]) -> BackendSet:
    distinct = _distinct(sets)
    if not distinct:
        raise UsageError("no model of this server has backends; start it with --backend")
    if model and model not in sets:
        raise UsageError(f"the model {model!r} has no backends; those that have are {', '.join(sets)}")
    if not model and len(distinct) > 1:
        raise UsageError(f"several models have backends; say model: one of {', '.join(sets)}")
    return sets[model] if model else distinct[0]


def _set_with(name: str, model: str, sets: Mapping[str, BackendSet]) -> BackendSet:
    having = [each for each in _distinct(sets) if name in each.names]
    if model or not sets:
        return _set_of(model, sets)
    if len(having) > 1:
        raise UsageError(f"several models have a backend {name!r}; say model: one of {', '.join(sets)}")
    if not having:
        raise UnknownBackendError(f"there is no backend {name!r}")
    return having[0]


def _distinct(sets: Mapping[str, BackendSet]) -> Sequence[BackendSet]:
    return list({id(each): each for each in sets.values()}.values())
