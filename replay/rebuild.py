"""A core as a trace's header describes it, or with something changed."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct

from eventlm.config import PluginSpec
from eventlm.config.load import replace_fields
from eventlm.control.plugins import PluginKind, ResolvedPlugin, resolve
from eventlm.core.core import Core
from eventlm.core.plugin import Batcher, Policy, Router
from eventlm.core.predictor import Predictor
from eventlm.core.state import Plugins
from eventlm.errors import UsageError
from eventlm.events import Header, PluginRecord


class Changes(Struct, frozen=True, kw_only=True):
    """What to do otherwise than the run did. `settings` are fields of the core's configuration.

    `trust_local_plugins` lets a header name a plug-in as `module:Class`, which is then imported; without it only
    installed ones are loaded, because a trace may come from anybody.
    """

    policy: PluginSpec | None = None
    batcher: PluginSpec | None = None
    router: PluginSpec | None = None
    settings: dict[str, Any] = {}
    trust_local_plugins: bool = False


class Rebuilt(NamedTuple):
    """The core, and a warning for each plug-in whose source is not what ran."""

    core: Core
    drift: list[str]


def rebuild(header: Header, changes: Changes | None = None) -> Rebuilt:
    """Raises UsageError where a plug-in cannot be found or a change makes no sense."""
    changes = changes or Changes()
    drift: list[str] = []
    policies: dict[str, Policy] = {}
    first_policy = ""
    for record in header.plugins:
        if record.kind == "policy":
            policies[record.name] = _typed(_recorded(record, changes, drift), Policy)
            first_policy = first_policy or record.name
    if changes.policy is not None:
        changed = resolve("policy", changes.policy)
        first_policy = changed.record.name
        policies[first_policy] = _typed(changed, Policy)
    batcher = _chosen("batcher", header, changes.batcher, changes, drift)
    router = _chosen("router", header, changes.router, changes, drift)
    plugins = Plugins(
        policies=policies, policy=first_policy, batcher=_typed(batcher, Batcher), router=_typed(router, Router)
    )
    config = replace_fields(header.core, changes.settings, where="--set")
    return Rebuilt(Core(config, plugins, Predictor.from_coefficients(header.predictor)), drift)


def _chosen(
    kind: PluginKind, header: Header, spec: PluginSpec | None, changes: Changes, drift: list[str]
) -> ResolvedPlugin:
    if spec is not None:
        return resolve(kind, spec)
    for record in header.plugins:
        if record.kind == kind:
            return _recorded(record, changes, drift)
    raise UsageError(f"the trace's header names no {kind}")


def _recorded(record: PluginRecord, changes: Changes, drift: list[str]) -> ResolvedPlugin:
    if ":" in record.name and not changes.trust_local_plugins:
        raise UsageError(
            f"the trace was recorded with the local {record.kind} {record.name}; to verify it, that code must be "
            "imported: if you trust it, say so with --trust-local-plugins"
        )
    kind: Any = record.kind
    resolved = resolve(kind, {"type": record.name, **record.parameters})
    if resolved.record.source_hash != record.source_hash:
        drift.append(f"the {record.kind} {record.name} has another source than when the trace was recorded")
    return resolved


def _typed(resolved: ResolvedPlugin, kind: type[Any]) -> Any:
    if not isinstance(resolved.instance, kind):
        raise UsageError(f"{resolved.record.reference} is not a {kind.__name__}")
    return resolved.instance
