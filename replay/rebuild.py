"""A core as a trace's header describes it, or with something changed."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct, structs

from eventlm.config import CoreConfig, PluginSpec
from eventlm.config.load import replace_fields
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.core.core import Core
from eventlm.core.plugin import Policy
from eventlm.core.predictor import Predictor
from eventlm.core.state import Plugins
from eventlm.engine.plugins.registry import ResolvedPlugin, resolve
from eventlm.errors import TraceVersionError, UsageError
from eventlm.events import Header, PluginRecord
from eventlm.types import PluginKind

#: Fields of the core's configuration that block integers and the replicas in facts depend on.
FIXED_BY_FACTS = ("block_size", "models", "num_replicas")


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

    def describe(self) -> str:
        """What is changed, as one would ask for it; empty if nothing is."""
        kinds = {"policy": self.policy, "batcher": self.batcher, "router": self.router}
        parts = [f"{kind} {format_plugin_spec(spec)}" for kind, spec in kinds.items() if spec is not None]
        return ", ".join(parts + [f"{name}={value}" for name, value in self.settings.items()])


class Rebuilt(NamedTuple):
    """What a core is made of, and a warning for each plug-in whose source is not what ran."""

    config: CoreConfig
    plugins: Plugins
    predictor: Predictor
    drift: list[str]

    def new_core(self) -> Core:
        """As it was when the run began."""
        return Core(self.config, self.plugins, self.predictor)

    def restored_core(self, snapshot: bytes) -> Core:
        """As it was when the snapshot was taken. Raises InvariantError if it is none of such a core."""
        return Core.restored(self.config, self.plugins, snapshot)


#: What a snapshot depends on, so that a core with another value of it cannot go on from there.
FIXED_BY_SNAPSHOT = ("num_blocks",)


def rebuild(header: Header, changes: Changes | None = None) -> Rebuilt:
    """Raises UsageError where a plug-in cannot be found or a change makes no sense."""
    changes = changes or Changes()
    if header.flags:
        flags = ", ".join(map(str, header.flags[:8]))
        raise TraceVersionError(f"the run had changes of behaviour ({flags}) that this version does not know")
    if header.s:
        _check_changes_midway(header, changes)
    drift: list[str] = []
    policies: dict[str, Policy] = {}
    first_policy = ""
    for place, record in enumerate(record for record in header.plugins if record.kind == "policy"):
        # The first is the one that ran from the start; a change takes its place, so it need not be loaded.
        resolved = (
            resolve("policy", changes.policy) if place == 0 and changes.policy else _recorded(record, changes, drift)
        )
        # Under both names, as the run may swap in what was replaced.
        for name in (resolved.record.name, record.name):
            policies.setdefault(name, resolved.instance)
        first_policy = first_policy or resolved.record.name
    batcher = _chosen("batcher", header, changes.batcher, changes, drift)
    router = _chosen("router", header, changes.router, changes, drift)
    plugins = Plugins(policies=policies, policy=first_policy, batcher=batcher.instance, router=router.instance)
    config = _changed_config(header.core, changes.settings)
    return Rebuilt(config, plugins, Predictor.from_coefficients(header.predictor), drift)


def _check_changes_midway(header: Header, changes: Changes) -> None:
    """The requests of a snapshot have been ordered by the recorded policy, and have blocks of the recorded pool."""
    fixed = ["--policy"] if changes.policy is not None else []
    fixed += [f"--set {name}" for name in FIXED_BY_SNAPSHOT if name in changes.settings]
    if fixed:
        raise UsageError(
            f"{fixed[0]}: the trace begins in the middle of the run, at event {header.s}, with requests under way that "
            "were ordered and placed without it; it needs a trace from the run's start"
        )


def _changed_config(config: CoreConfig, settings: dict[str, Any]) -> CoreConfig:
    """The recorded configuration with some fields changed, as far as the recorded facts still fit it."""
    fixed = [name for name in settings if name in FIXED_BY_FACTS]
    if fixed:
        raise UsageError(
            f"--set {fixed[0]}: the trace's facts were made for {getattr(config, fixed[0])}, it cannot change"
        )
    changed = replace_fields(config, settings, where="--set")
    longest = (changed.num_blocks - 1) * changed.block_size
    if settings.get("max_model_len", 0) > longest:
        raise UsageError(
            f"--set max_model_len={changed.max_model_len}: {changed.num_blocks:,} blocks of {changed.block_size} hold "
            f"{longest:,} tokens; lower it or raise num_blocks"
        )
    return structs.replace(changed, max_model_len=min(changed.max_model_len, longest))


def _chosen(
    kind: PluginKind, header: Header, spec: PluginSpec | None, changes: Changes, drift: list[str]
) -> ResolvedPlugin:
    if spec is not None:
        return resolve(kind, spec)
    for record in header.plugins:
        if record.kind == kind:
            return _recorded(record, changes, drift)
    raise AssertionError(f"a header without a {kind} is refused when it is read")


def _recorded(record: PluginRecord, changes: Changes, drift: list[str]) -> ResolvedPlugin:
    if ":" in record.name and not changes.trust_local_plugins:
        raise UsageError(
            f"the trace was recorded with the local {record.kind} {record.name}, and its decisions cannot be "
            "made again without importing that code: if you trust it, say so with --trust-local-plugins"
        )
    try:
        resolved = resolve(record.kind, record.parameters | {"type": record.name})
    except UsageError as error:
        raise UsageError(
            f"line 1 of the trace names a {record.kind} that cannot be had here: {error}; install what the run had "
            f"(`eventlm replay` takes another: --{record.kind})"
        ) from error
    for field in ("reference", "version", "source_hash"):
        before, now = getattr(record, field), getattr(resolved.record, field)
        if before != now:
            drift.append(
                f"the {record.kind} {record.name} has another {field} ({now}) than the one that ran ({before})"
            )
    return resolved
