"""Plug-ins by name: policies, batchers and routers, built-in or third-party, imported only when chosen.

A spec's `type` is a built-in name, the name of an entry point in the group `eventlm.policies` (its base class
decides what it is), or `module:Class`, for which the current directory is searched too. The other keys of the
spec are the fields of the class.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import traceback
from importlib import metadata
from typing import Any, NamedTuple

import msgspec

from eventlm._version import __version__
from eventlm.config import PluginSpec
from eventlm.config.load import lower_first
from eventlm.config.options import allowed_values, did_you_mean
from eventlm.config.plugin_spec import format_value
from eventlm.core.plugin import Batcher, Policy, Router
from eventlm.core.plugin_calls import RAISED
from eventlm.engine.plugins.source_hash import source_hash
from eventlm.errors import UsageError
from eventlm.events import PluginRecord
from eventlm.types import PluginKind

ENTRY_POINT_GROUP = "eventlm.policies"

BASES: dict[PluginKind, type[Policy] | type[Batcher] | type[Router]] = {
    "policy": Policy,
    "batcher": Batcher,
    "router": Router,
}

BUILT_IN: dict[PluginKind, dict[str, str]] = {
    "policy": {
        "fcfs": "eventlm.policies.fcfs:Fcfs",
        "edf": "eventlm.policies.edf:Edf",
        "lrs": "eventlm.policies.lrs:Lrs",
        "lpm": "eventlm.policies.lpm:Lpm",
    },
    "batcher": {
        "fixed": "eventlm.policies.fixed:Fixed",
        "dynamic": "eventlm.policies.dynamic:Dynamic",
        "space_sharing": "eventlm.policies.space_sharing:SpaceSharing",
    },
    "router": {
        "round_robin": "eventlm.policies.round_robin:RoundRobin",
        "pull": "eventlm.policies.pull:Pull",
        "least_loaded": "eventlm.policies.least_loaded:LeastLoaded",
        "prefix_affinity": "eventlm.policies.prefix_affinity:PrefixAffinity",
        "session_affinity": "eventlm.policies.session_affinity:SessionAffinity",
    },
}


class ResolvedPlugin(NamedTuple):
    """A plug-in ready to use, and what a trace's header says of it."""

    instance: Any
    record: PluginRecord


class PluginInfo(NamedTuple):
    """A plug-in as `eventlm policies` lists it. `problem` is why it cannot be used, else empty."""

    kind: str
    name: str
    reference: str
    parameters: str
    description: str
    origin: str
    problem: str


class _Source(NamedTuple):
    """Where a plug-in comes from: `version` is that of its distribution, '' for a bare module."""

    reference: str
    origin: str
    version: str


def resolve(kind: PluginKind, spec: PluginSpec) -> ResolvedPlugin:
    """The plug-in that a spec names, with its parameters.

    Raises UsageError for an unknown name or parameter (with the nearest known one), a value of the wrong
    type, a module that cannot be imported, or a class that is not of this kind.
    """
    name = str(spec["type"])
    source = _find(kind, name)
    plugin_class = load_class(name, source.reference)
    _check_kind(kind, name, plugin_class)
    parameters = {key: value for key, value in spec.items() if key != "type"}
    instance = instantiate(kind, name, plugin_class, parameters)
    record = PluginRecord(
        kind=kind,
        name=name,
        reference=source.reference,
        parameters=_parameters(kind, name, instance),
        version=_version(kind, plugin_class, source),
        source_hash=_source_hash(plugin_class),
    )
    return ResolvedPlugin(instance, record)


def list_plugins() -> list[PluginInfo]:
    """Every plug-in that is installed: the built-in ones, then third parties' by name."""
    infos = [
        _describe(kind, name, _Source(reference, "built-in", __version__))
        for kind, references in BUILT_IN.items()
        for name, reference in references.items()
    ]
    third_party = [_describe("", point.name, _entry_point_source(point)) for point in _entry_points()]
    return infos + sorted(third_party)


def _source_hash(plugin_class: type) -> str:
    """Of the class's module, as `source_hash` takes it; '' if there is no source. What it imports is not part of it."""
    loader = getattr(sys.modules[plugin_class.__module__].__spec__, "loader", None)
    # `get_source` decodes with universal newlines and also reads from zip files.
    get_source = getattr(loader, "get_source", None)
    text = get_source(plugin_class.__module__) if get_source else None
    return source_hash(text) if text else ""


def _find(kind: PluginKind, name: str) -> _Source:
    if name in BUILT_IN[kind]:
        return _Source(BUILT_IN[kind][name], "built-in", __version__)
    for other, references in BUILT_IN.items():
        if name in references:
            raise UsageError(f"{name} is a {other}, not a {kind}; choose it with --{other} {name}")
    module, colon, attribute = name.partition(":")
    if colon and module in BUILT_IN[kind]:
        raise UsageError(f"{kind} {name!r}: parameters are written {module}:PARAMETER=VALUE; {attribute!r} is not")
    if colon:
        return _Source(name, module, "")
    points = [point for point in _entry_points() if point.name == name]
    if not points:
        raise UsageError(_unknown_name(kind, name))
    sources = sorted({_entry_point_source(point) for point in points})
    if len(sources) > 1:
        origins = " and ".join(source.origin for source in sources)
        raise UsageError(f"{kind} {name!r} is ambiguous: {origins} both have it; name it as module:Class instead")
    return sources[0]


def _entry_points() -> list[metadata.EntryPoint]:
    return list(metadata.entry_points(group=ENTRY_POINT_GROUP))


def _entry_point_source(point: metadata.EntryPoint) -> _Source:
    distribution = point.dist
    if distribution is None:
        return _Source(point.value, point.module, "")
    return _Source(point.value, distribution.name, distribution.version)


def _unknown_name(kind: PluginKind, name: str) -> str:
    third_party = [info.name for info in list_plugins() if info.origin != "built-in" and info.kind in (kind, "?")]
    known = [*BUILT_IN[kind], *third_party]
    hint = did_you_mean(name, known, listed_as="installed")
    return f"unknown {kind} {name!r}{hint}; a local one is written module:Class"


def load_class(name: str, reference: str) -> type[Any]:
    """The class at `reference`, which is `module:Class`; `name` is what the user called it. Raises UsageError."""
    module_name, _, attribute = reference.partition(":")
    if ":" in name and os.getcwd() not in sys.path:
        # At the end, so that a file of the user's never shadows an installed module.
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"plug-in {name!r}: {module_name} needs the module {error.name!r}, which is missing"
            ) from error
        raise UsageError(
            f"plug-in {name!r}: no module {error.name!r} in {os.getcwd()} or among the installed packages"
        ) from error
    except RAISED as error:
        raise UsageError(
            f"plug-in {name!r}: importing {module_name} failed at {_place(error)}: {type(error).__name__}: {error}"
        ) from error
    plugin_class = getattr(module, attribute, None)
    if plugin_class is None:
        hint = did_you_mean(attribute, [key for key, value in vars(module).items() if isinstance(value, type)])
        raise UsageError(f"plug-in {name!r}: {module_name} has no class {attribute!r}{hint}")
    return plugin_class  # type: ignore[no-any-return]


def _place(error: BaseException) -> str:
    """File and line where an import failed."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _kind_of(plugin_class: object) -> PluginKind | None:
    if not isinstance(plugin_class, type):
        return None
    return next((kind for kind, base in BASES.items() if issubclass(plugin_class, base)), None)


def _check_kind(kind: PluginKind, name: str, plugin_class: object) -> None:
    actual = _kind_of(plugin_class)
    if actual is None:
        base = BASES[kind]
        raise UsageError(
            f"plug-in {name!r} is not a {kind}: it must be a class derived from {base.__module__}.{base.__name__}"
        )
    if actual != kind:
        raise UsageError(f"{name} is a {actual}, not a {kind}; choose it with --{actual} {name}")


def instantiate(kind: str, name: str, plugin_class: type[msgspec.Struct], parameters: dict[str, Any]) -> Any:
    """A plug-in with these parameters. Raises UsageError for those that it does not have, or take."""
    fields = {field.name: field for field in msgspec.structs.fields(plugin_class)}
    for key in parameters:
        if key not in fields:
            takes = f"it takes {', '.join(fields)}" if fields else "it takes none"
            raise UsageError(f"{kind} {name} has no parameter {key!r}{did_you_mean(key, fields)} ({takes})")
    for key, field in fields.items():
        if key not in parameters and field.required:
            raise UsageError(f"{kind} {name} needs the parameter {key}; write {name}:{key}=VALUE")
    for key, value in parameters.items():
        where = f"{kind} {name}: {key}={format_value(value)}"
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{where}: must be a finite number")
        try:
            msgspec.convert(value, fields[key].type, strict=True)
        except msgspec.ValidationError as error:
            allowed = allowed_values(fields[key].type)
            raise UsageError(f"{where}: {f'must be {allowed}' if allowed else lower_first(str(error))}") from error
    try:
        return msgspec.convert(parameters, plugin_class, strict=True)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise UsageError(f"{kind} {name}: {error}") from error
    except RAISED as error:  # from code of its own, as above
        raise UsageError(f"{kind} {name}: failed at {_place(error)}: {type(error).__name__}: {error}") from error


def _parameters(kind: PluginKind, name: str, instance: msgspec.Struct) -> dict[str, Any]:
    """As a trace's header has them. Raises UsageError where a replay could not make the plug-in of them again."""
    values = {key: getattr(instance, key) for key in instance.__struct_fields__}
    if "type" in values:
        raise UsageError(f"{kind} {name}: a parameter cannot be called `type`, which stands for the {kind}'s name")
    try:
        recorded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
        msgspec.convert(recorded, type(instance), strict=True)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise UsageError(f"{kind} {name}: its parameters cannot be recorded: {lower_first(str(error))}") from error
    return recorded


def _version(kind: PluginKind, plugin_class: type[Any], source: _Source) -> str:
    """The version that the class states itself, else that of its distribution, else that of its base."""
    own: str = plugin_class.version
    inherited: str = BASES[kind].version
    return own if own != inherited else source.version or inherited


def _describe(kind: str, name: str, source: _Source) -> PluginInfo:
    try:
        plugin_class = load_class(name, source.reference)
        actual = _kind_of(plugin_class)
        if actual is None:
            raise UsageError(f"plug-in {name!r} is neither a policy nor a batcher nor a router")
    except UsageError as error:
        return PluginInfo(kind or "?", name, source.reference, "", "", source.origin, str(error))
    parameters = ", ".join(_parameter_text(field) for field in msgspec.structs.fields(plugin_class))
    description = (plugin_class.__doc__ or "").strip().split("\n")[0]
    return PluginInfo(actual, name, source.reference, parameters, description, source.origin, "")


def _parameter_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return field.name
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"{field.name}={format_value(default)}"
