"""Builds the core of a recorded run from its header, optionally with changes."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct, structs

from eventlm.config import CoreConfig, PluginSpec
from eventlm.config.load import replace_fields
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.core.core import Core
from eventlm.core.plugin import Policy
from eventlm.core.predictor import Predictor
from eventlm.core.shards import context_capacity
from eventlm.core.state.replicaset import Plugins, SetParts
from eventlm.engine.plugins.registry import ResolvedPlugin, resolve
from eventlm.errors import TraceVersionError, UsageError
from eventlm.events import Header, PluginRecord, ReplicasetRecord
from eventlm.types import PluginKind

#: Fields of the core's configuration that cannot change because recorded facts depend on them.
FIXED_BY_FACTS = ("block_size", "models", "num_replicas")


class Changes(Struct, frozen=True, kw_only=True):
    """Changes to the recorded configuration. `settings` are fields of the core's configuration.

    They hold in every replicaset.

    `trust_local_plugins` permits to import plug-ins that the header names as `module:Class`. By default only installed
    ones are loaded, because a trace may come from anybody.
    """

    policy: PluginSpec | None = None
    batcher: PluginSpec | None = None
    router: PluginSpec | None = None
    settings: dict[str, Any] = {}
    trust_local_plugins: bool = False

    def describe(self) -> str:
        """The changes as on the command line; empty if there are none."""
        kinds = {"policy": self.policy, "batcher": self.batcher, "router": self.router}
        parts = [f"{kind} {format_plugin_spec(spec)}" for kind, spec in kinds.items() if spec is not None]
        return ", ".join(parts + [f"{name}={value}" for name, value in self.settings.items()])


class Rebuilt(NamedTuple):
    """The parts of a core, and a warning for each plug-in that is not the one that ran.

    config, plugins, predictor: of the first replicaset; others: of the further ones. is_changed: they are not those of
    the run.
    """

    config: CoreConfig
    plugins: Plugins
    predictor: Predictor
    drift: list[str]
    others: list[SetParts] = []
    is_changed: bool = False

    def new_core(self) -> Core:
        """The core at the start of the run."""
        return Core(self.config, self.plugins, self.predictor, self.others)

    def restored_core(self, snapshot: bytes) -> Core:
        """The core at the time of the snapshot. Raises InvariantError if the snapshot does not fit."""
        return Core.restored(self.config, self.plugins, snapshot, self.others, is_changed=self.is_changed)


#: Fields that cannot change if the core is restored from a snapshot.
FIXED_BY_SNAPSHOT = ("num_blocks", "num_kv_groups", "kv_shard_tokens")


def rebuild(header: Header, changes: Changes | None = None) -> Rebuilt:
    """Raises UsageError if a plug-in is missing or a change is invalid."""
    changes = changes or Changes()
    if header.flags:
        flags = ", ".join(map(str, header.flags[:8]))
        raise TraceVersionError(f"the run had changes of behaviour ({flags}) that this version does not know")
    if header.s:
        _check_changes_midway(header, changes)
    drift: list[str] = []
    first, *others = [_rebuild_set(record, changes, drift) for record in header.sets]
    return Rebuilt(*first, drift, others, is_changed=changes != Changes())


def _rebuild_set(run: ReplicasetRecord, changes: Changes, drift: list[str]) -> SetParts:
    policies: dict[str, Policy] = {}
    first_policy = ""
    for index, record in enumerate(record for record in run.plugins if record.kind == "policy"):
        # The first ran from the start. A change replaces it, so it need not be loaded.
        resolved = (
            resolve("policy", changes.policy) if index == 0 and changes.policy else _recorded(record, changes, drift)
        )
        # Under both names, because the run may swap back to the replaced one.
        for name in (resolved.record.name, record.name):
            policies.setdefault(name, resolved.instance)
        first_policy = first_policy or resolved.record.name
    batcher = _chosen("batcher", run, changes.batcher, changes, drift)
    router = _chosen("router", run, changes.router, changes, drift)
    plugins = Plugins(policies=policies, policy=first_policy, batcher=batcher.instance, router=router.instance)
    config = _changed_config(run.core, changes.settings)
    return SetParts(config, plugins, Predictor.from_coefficients(run.predictor))


def check_one_set(header: Header, path: object, what: str) -> None:
    """Raise UsageError for a run with several replicasets, of which `what` knows nothing yet."""
    if header.replicasets:
        models = ", ".join(each.core.models[0] for each in header.sets)
        raise UsageError(
            f"{path}: {what} is for runs of one replicaset, and this one has {len(header.sets)} ({models}); "
            "`eventlm replay` without it verifies them all"
        )


def _check_changes_midway(header: Header, changes: Changes) -> None:
    """A snapshot depends on the recorded policy and the recorded pool of blocks."""
    fixed = ["--policy"] if changes.policy is not None else []
    fixed += [f"--set {name}" for name in FIXED_BY_SNAPSHOT if name in changes.settings]
    if fixed:
        raise UsageError(
            f"{fixed[0]}: the trace begins in the middle of the run, at event {header.s}, with live requests that were "
            "ordered and placed without it; use a trace from the run's start"
        )


def _changed_config(config: CoreConfig, settings: dict[str, Any]) -> CoreConfig:
    """The recorded configuration with changed fields."""
    fixed = [name for name in settings if name in FIXED_BY_FACTS]
    if fixed:
        raise UsageError(
            f"--set {fixed[0]}: the trace's facts depend on the recorded {getattr(config, fixed[0])}, it cannot change"
        )
    changed = replace_fields(config, settings, where="--set")
    longest = context_capacity(changed.num_blocks, changed.block_size, changed.groups, changed.kv_shard_tokens or 0)
    if settings.get("max_model_len", 0) > longest:
        raise UsageError(
            f"--set max_model_len={changed.max_model_len}: {changed.num_blocks:,} blocks of {changed.block_size} hold "
            f"{longest:,} tokens; lower it or raise num_blocks"
        )
    return structs.replace(changed, max_model_len=min(changed.max_model_len, longest))


def _chosen(
    kind: PluginKind, run: ReplicasetRecord, spec: PluginSpec | None, changes: Changes, drift: list[str]
) -> ResolvedPlugin:
    if spec is not None:
        return resolve(kind, spec)
    for record in run.plugins:
        if record.kind == kind:
            return _recorded(record, changes, drift)
    raise AssertionError(f"a header without a {kind} is refused when it is read")


def _recorded(record: PluginRecord, changes: Changes, drift: list[str]) -> ResolvedPlugin:
    if ":" in record.name and not changes.trust_local_plugins:
        raise UsageError(
            f"the trace was recorded with the local {record.kind} {record.name}, and its decisions cannot be "
            "replayed without importing that code; if you trust it, use --trust-local-plugins"
        )
    try:
        resolved = resolve(record.kind, record.parameters | {"type": record.name})
    except UsageError as error:
        raise UsageError(
            f"line 1 of the trace names a {record.kind} that is not available: {error}; install it, or replay with "
            f"another (--{record.kind})"
        ) from error
    for field in ("reference", "version", "source_hash"):
        before, now = getattr(record, field), getattr(resolved.record, field)
        if before != now:
            drift.append(f"the {record.kind} {record.name} has another {field} ({now}) than in the run ({before})")
    return resolved
