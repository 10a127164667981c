"""Cost models by name, from TOML files and from recorded runs."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from eventlm.bus.log_reader import LogReader
from eventlm.config.load import lower_first, read_toml
from eventlm.config.options import did_you_mean
from eventlm.errors import UsageError
from eventlm.replay.cost.fit import FittedCost, fit_cost
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.cost.recorded_steps import StepCollector, by_set
from eventlm.replay.cost.roofline import RooflineCost
from eventlm.types import OnProgress

_FOLDER = Path(__file__).with_name("models")
_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<where>.*)`$", re.S)


def built_in_cost_models() -> list[str]:
    """Names of the models that come with eventlm, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_cost_model(
    text: str, replicaset: str = "", *, on_progress: OnProgress | None = None
) -> LinearCost | RooflineCost:
    """A cost model by its name, from a TOML file (`*.toml`), or fitted to a recorded run, or a replicaset of it: see
    `fit_trace`.

    `on_progress` gets the bytes of the run read, and their total. Raises UsageError that names the file and the key, or
    lists the built-in names; and what LogReader raises.
    """
    names = built_in_cost_models()
    if text in names:
        return _from_toml(_FOLDER / f"{text}.toml")
    path = Path(text)
    if path.suffix == ".toml":
        return _from_toml(path)
    if path.exists():
        return fit_trace(path, replicaset, on_progress=on_progress).model
    hint = did_you_mean(text, names, listed_as="built in")
    raise UsageError(f"no cost model {text!r}{hint}; or give a TOML file, or a recorded run to fit one to")


def fit_trace(path: Path | str, replicaset: str = "", *, on_progress: OnProgress | None = None) -> FittedCost:
    """Fit to the steps of a trace or run folder, for workloads with other arrival times than the run. Of a run with
    several replicasets, to those of the one of this name.

    `on_progress` gets the bytes read, and their total. Raises UsageError, and what LogReader raises.
    """
    collector = StepCollector()
    with LogReader(path) as log:
        header = log.header
        names = [each.name for each in header.sets]
        if len(names) > 1 and replicaset not in names:
            raise UsageError(
                f"{path}: a cost model is fitted to the replicaset of its name, and the run has {', '.join(names)}; "
                "give each simulated replicaset one of these names, or a cost_model of its own"
            )
        log.fold(collector.apply, on_progress=on_progress)
    index = names.index(replicaset) if len(names) > 1 else 0
    steps = by_set(header, collector.steps)[index]
    if not steps:
        whose = f"the replicaset {replicaset}" if len(names) > 1 else "it"
        raise UsageError(f"{path}: {whose} has no completed step to fit a cost model to")
    return fit_cost(steps, follows_run=False, num_groups=header.sets[index].core.groups)


def _from_toml(path: Path) -> LinearCost | RooflineCost:
    table = read_toml(path, what="the cost model")
    try:
        return msgspec.convert(table, LinearCost | RooflineCost)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        where = f"{path}, {found['where']}" if found and found["where"] else str(path)
        raise UsageError(f"{where}: {lower_first(found['what'] if found else str(error))}") from None
