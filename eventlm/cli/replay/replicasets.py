"""`--replicaset NAME:policy=edf,...`: changes to one replicaset of a recorded run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from eventlm.cli.simulate.flags import read_cost_model
from eventlm.config import CoreConfig
from eventlm.config.core import Forwarding
from eventlm.config.options import did_you_mean
from eventlm.config.plugin_spec import parse_plugin_spec, parse_value
from eventlm.config.replicasets import split_replicaset_spec
from eventlm.errors import UsageError

if TYPE_CHECKING:
    from eventlm.replay.cost.backend_model import AnyCost
    from eventlm.replay.rebuild import SetChanges

PLUGIN_KINDS = ("policy", "batcher", "router")
#: Other names of fields of the core's configuration.
SHORT_NAMES = {"blocks": "num_blocks"}
#: Keys that change nothing of the core, and all others.
REPLICAS, COST_MODEL, MODEL, CHANGES = "replicas", "cost_model", "model", "changes"
_SETTINGS = (*SHORT_NAMES, *CoreConfig.__struct_fields__, *Forwarding.__struct_fields__)


class OwnChanges(NamedTuple):
    """What is other in a replicaset. num_replicas: None: as recorded. cost_model: of its steps; "": as for all. model:
    where it is; None: where the trace says.
    """

    changes: SetChanges
    num_replicas: int | None = None
    cost_model: str = ""
    model: str | None = None


def add_replicaset_flag(group: argparse._ActionsContainer, *, may: str) -> None:
    """Add `--replicaset`, which `parse_replicasets` reads. may: what else than plug-ins and settings it takes."""
    group.add_argument(
        "--replicaset",
        action="append",
        default=[],
        dest="replicasets",
        metavar="NAME:KEY=VALUE,...",
        help=f"the same for one replicaset of a run with several: policy, batcher, router, {may}keys of --set, such as "
        "small:policy=edf,max_num_seqs=64; it goes before what is for all",
    )


def parse_replicasets(specs: Sequence[str]) -> dict[str, list[OwnChanges]]:
    """What each replicaset was given, by its name, once for each time that it was named. Raises UsageError."""
    found: dict[str, list[OwnChanges]] = {}
    for spec in dict.fromkeys(specs):
        name, table = split_replicaset_spec(spec, example="policy=edf")
        try:
            found.setdefault(name, []).append(_own_changes(table))
        except UsageError as error:
            raise UsageError(f"--replicaset {spec}: {error}") from error
    return found


def _own_changes(table: dict[str, str]) -> OwnChanges:
    from eventlm.replay.rebuild import SetChanges

    plugins: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, text in table.items():
        if not text:
            raise UsageError(f"{key} has no value")
        if key in PLUGIN_KINDS:
            plugins[key] = parse_plugin_spec(text)
        elif key == REPLICAS and not text.isdecimal():
            raise UsageError(f"{key}={text}: must be a number of replicas")
        elif key not in (REPLICAS, COST_MODEL, MODEL):
            if key not in _SETTINGS:
                known = [*PLUGIN_KINDS, REPLICAS, COST_MODEL, MODEL, *_SETTINGS]
                raise UsageError(f"unknown key {key!r}{did_you_mean(key, known, listed_as='known')}")
            settings[SHORT_NAMES.get(key, key)] = parse_value(text)
    return OwnChanges(
        SetChanges(**plugins, settings=settings),
        num_replicas=int(table[REPLICAS]) if REPLICAS in table else None,
        cost_model=table.get(COST_MODEL, ""),
        model=table.get(MODEL),
    )


def once(found: dict[str, list[OwnChanges]], what: str, *, allowed: Sequence[str]) -> dict[str, OwnChanges]:
    """What each replicaset was given where that is said once, for `what`. allowed: which of the keys, and CHANGES.

    Raises UsageError for a replicaset that was named twice, and a key that is not allowed.
    """
    for name, each in found.items():
        if len(each) > 1:
            raise UsageError(f"--replicaset {name}: {what} takes each replicaset once; give all its keys together")
        check_keys(name, each[0], what, allowed=allowed)
    return {name: each[0] for name, each in found.items()}


def check_keys(name: str, own: OwnChanges, what: str, *, allowed: Sequence[str]) -> None:
    """Raise UsageError for a key that `what` does not take."""
    changes = [*own.changes.plugins(), *own.changes.settings]
    given = {
        CHANGES: changes[0] if changes else "",
        REPLICAS: REPLICAS if own.num_replicas is not None else "",
        COST_MODEL: own.cost_model and COST_MODEL,
        MODEL: MODEL if own.model is not None else "",
    }
    for key, named in given.items():
        if named and key not in allowed:
            raise UsageError(f"--replicaset {name}: {what} does not take {named}; leave it out")


def changes_of(found: dict[str, OwnChanges]) -> dict[str, SetChanges]:
    """The changes of the core in each replicaset that has any."""
    from eventlm.replay.rebuild import SetChanges

    return {name: own.changes for name, own in found.items() if own.changes != SetChanges()}


def read_cost_models(path: str, of_all: str | None, found: dict[str, list[OwnChanges]]) -> dict[str, AnyCost]:
    """By replicaset of the run at `path`, the cost models that were given: its own, else the one for all.

    Raises UsageError, and what LogReader raises.
    """
    from eventlm.bus.log_reader import LogReader

    texts: dict[str, list[str]] = {}
    if of_all is not None:
        with LogReader(path) as log:
            texts = {each.name: [of_all] for each in log.header.sets}
    for name, each in found.items():
        own = list(dict.fromkeys(one.cost_model for one in each if one.cost_model))
        if len(own) > 1:
            raise UsageError(f"--replicaset {name}: it has one cost_model, not {len(own)}; compare them one by one")
        texts |= {name: own} if own else {}
    return {name: read_cost_model(text, name) for name, (text,) in texts.items()}
