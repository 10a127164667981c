"""The options of the engine that recorded a run, for a simulation of its workload."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from eventlm.config.options import options
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.errors import UsageError
from eventlm.events import Header
from eventlm.replay.predicate.observation import changed_options

#: Fields of the core's limits that are not called as their options, and those that are no option of a simulation.
_OTHER_NAMES = {"num_replicas": "replicas"}
_NO_OPTIONS = ("models",)


def recorded_options(
    header: Header, given: dict[str, Any] | None = None, *, trust_local_plugins: bool = False
) -> dict[str, Any]:
    """Options by name: those of a run, over them those that are `given`.

    Raises UsageError for a plug-in that the trace names as `module:Class`, which runs code, unless it is trusted or
    another is given.
    """
    given = given or {}
    found: dict[str, Any] = {"predictor": header.predictor}
    for field in header.core.__struct_fields__:
        name = _OTHER_NAMES.get(field, field)
        if field not in _NO_OPTIONS and name in options() and (value := getattr(header.core, field)) is not UNSET:
            found[name] = value
    extra: list[str] = []
    for record in header.plugins:
        spec = {"type": record.name, **record.parameters}
        if ":" in record.name and not trust_local_plugins:
            if record.kind in given:
                continue
            raise UsageError(
                f"the run had the local {record.kind} {record.name}; if you trust that code, use "
                f"--trust-local-plugins, or give another with --{record.kind}"
            )
        if record.kind in found:
            extra.append(format_plugin_spec(spec))
        else:
            found[record.kind] = spec
    if extra:
        found["extra_policy"] = extra
    return changed_options(found, given)
