"""Builds the core of a recorded run from its header, optionally with changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from msgspec import UNSET, Struct, structs

from eventlm.config import CoreConfig, PluginSpec
from eventlm.config.core import Forwarding
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


class SetChanges(Struct, frozen=True, kw_only=True):
    """Changes to a replicaset. `settings` are fields of the core's configuration."""

    policy: PluginSpec | None = None
    batcher: PluginSpec | None = None
    router: PluginSpec | None = None
    settings: dict[str, Any] = {}

    def plugins(self) -> dict[PluginKind, PluginSpec]:
        """The plug-ins that are other ones."""
        specs: dict[PluginKind, PluginSpec | None] = {
            "policy": self.policy,
            "batcher": self.batcher,
            "router": self.router,
        }
        return {kind: spec for kind, spec in specs.items() if spec is not None}

    def describe(self) -> str:
        """The changes as on the command line; empty if there are none."""
        parts = [f"{kind} {format_plugin_spec(spec)}" for kind, spec in self.plugins().items()]
        return ", ".join(parts + [f"{name}={value}" for name, value in self.settings.items()])


class Changes(SetChanges, frozen=True, kw_only=True):
    """Changes to the recorded configuration. They hold in every replicaset, and before them in one those that it has in
    `of_sets`, by its name.

    `trust_local_plugins` permits to import plug-ins that the header names as `module:Class`. By default only installed
    ones are loaded, because a trace may come from anybody.
    """

    of_sets: dict[str, SetChanges] = {}
    trust_local_plugins: bool = False

    def of_set(self, name: str) -> SetChanges:
        """What changes in a replicaset."""
        own = self.of_sets.get(name, SetChanges())
        return SetChanges(**(self.plugins() | own.plugins()), settings=self.settings | own.settings)

    def describe(self) -> str:
        """The changes as on the command line; empty if there are none."""
        parts = [super().describe()] if super().describe() else []
        return "; ".join([*parts, *(f"{name}: {own.describe()}" for name, own in self.of_sets.items())])


class Rebuilt(NamedTuple):
    """The parts of each replicaset of a core, and a warning for each plug-in that is not the one that ran. is_changed:
    they are not those of the run.
    """

    sets: list[SetParts]
    drift: list[str]
    is_changed: bool = False

    def new_core(self) -> Core:
        """The core at the start of the run."""
        first, *others = self.sets
        return Core(*first, others)

    def restored_core(self, snapshot: bytes) -> Core:
        """The core at the time of the snapshot. Raises InvariantError if the snapshot does not fit."""
        first, *others = self.sets
        return Core.restored(first.config, first.plugins, snapshot, others, is_changed=self.is_changed)


#: Fields that cannot change if the core is restored from a snapshot.
FIXED_BY_SNAPSHOT = ("num_blocks", "num_kv_groups", "kv_shard_tokens")


def rebuild(header: Header, changes: Changes | None = None) -> Rebuilt:
    """Raises UsageError if a plug-in is missing or a change is invalid."""
    changes = changes or Changes()
    check_set_names(header, changes.of_sets)
    if header.flags:
        flags = ", ".join(map(str, header.flags[:8]))
        raise TraceVersionError(f"the run had changes of behaviour ({flags}) that this version does not know")
    if header.s:
        for record in header.sets:
            with errors_of_set(record.name, changes):
                _check_changes_midway(header, changes.of_set(record.name))
    drift: list[str] = []
    sets = []
    for record in header.sets:
        with errors_of_set(record.name, changes):
            sets.append(_rebuild_set(record, changes, drift))
    return Rebuilt(sets, drift, is_changed=changes != Changes())


@contextmanager
def errors_of_set(name: str, changes: Changes) -> Iterator[None]:
    """Say in usage errors that pass through which replicaset they are about, if it has changes of its own."""
    try:
        yield
    except UsageError as error:
        if name not in changes.of_sets:
            raise
        raise UsageError(f"replicaset {name}: {error}") from error


def check_set_names(header: Header, names: Iterable[str]) -> None:
    """Raise UsageError for a replicaset that the run does not have."""
    known = [each.name for each in header.sets]
    for name in names:
        if name not in known:
            listed = ", ".join(f"{each.name} ({each.core.models[0]})" for each in header.sets)
            raise UsageError(f"--replicaset {name}: the run has no replicaset of this name, but {listed}")


def _rebuild_set(run: ReplicasetRecord, changes: Changes, drift: list[str]) -> SetParts:
    own, trusts = changes.of_set(run.name), changes.trust_local_plugins
    policies: dict[str, Policy] = {}
    first_policy = ""
    for index, record in enumerate(record for record in run.plugins if record.kind == "policy"):
        # The first ran from the start. A change replaces it, so it need not be loaded.
        resolved = (
            resolve("policy", own.policy) if index == 0 and own.policy else _recorded(record, drift, trusts=trusts)
        )
        # Under both names, because the run may swap back to the replaced one.
        for name in (resolved.record.name, record.name):
            policies.setdefault(name, resolved.instance)
        first_policy = first_policy or resolved.record.name
    batcher = _chosen("batcher", run, own.batcher, drift, trusts=trusts)
    router = _chosen("router", run, own.router, drift, trusts=trusts)
    plugins = Plugins(policies=policies, policy=first_policy, batcher=batcher.instance, router=router.instance)
    config = _changed_config(run.core, own.settings)
    return SetParts(config, plugins, Predictor.from_coefficients(run.predictor))


def _check_changes_midway(header: Header, changes: SetChanges) -> None:
    """A snapshot depends on a replicaset's recorded policy and its recorded pool of blocks."""
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
    if config.forwards is not UNSET:
        # Both have names of their own.
        forwarding = {name: value for name, value in settings.items() if name in Forwarding.__struct_fields__}
        forwards = replace_fields(config.forwards, forwarding, where="--set")
        config = structs.replace(config, forwards=forwards)
        settings = {name: value for name, value in settings.items() if name not in forwarding}
    changed = replace_fields(config, settings, where="--set")
    longest = context_capacity(changed.num_blocks, changed.block_size, changed.groups, changed.kv_shard_tokens or 0)
    if settings.get("max_model_len", 0) > longest:
        raise UsageError(
            f"--set max_model_len={changed.max_model_len}: {changed.num_blocks:,} blocks of {changed.block_size} hold "
            f"{longest:,} tokens; lower it or raise num_blocks"
        )
    return structs.replace(changed, max_model_len=min(changed.max_model_len, longest))


def _chosen(
    kind: PluginKind, run: ReplicasetRecord, spec: PluginSpec | None, drift: list[str], *, trusts: bool
) -> ResolvedPlugin:
    if spec is not None:
        return resolve(kind, spec)
    for record in run.plugins:
        if record.kind == kind:
            return _recorded(record, drift, trusts=trusts)
    raise AssertionError(f"a header without a {kind} is refused when it is read")


def _recorded(record: PluginRecord, drift: list[str], *, trusts: bool) -> ResolvedPlugin:
    if ":" in record.name and not trusts:
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
