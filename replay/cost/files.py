"""Cost models by name, from TOML files and from recorded runs."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import UNSET

from eventlm.bus.log_reader import LogReader
from eventlm.config.load import lower_first, read_toml
from eventlm.config.options import did_you_mean
from eventlm.errors import UsageError
from eventlm.events import Event
from eventlm.replay.cost.backend_model import BackendCost, BackendsCost, FailureRate
from eventlm.replay.cost.fit import FittedCost, fit_cost
from eventlm.replay.cost.fit_backends import FittedBackends, fit_backends, forwards_of_sets
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.cost.recorded_forwards import ForwardCollector
from eventlm.replay.cost.recorded_steps import StepCollector, by_set
from eventlm.replay.cost.roofline import RooflineCost
from eventlm.types import OnProgress

#: What a file can say.
FileCost = LinearCost | RooflineCost | BackendsCost

#: Before the numbers of a model of other servers.
_BACKENDS = "backends:"
_EXAMPLE = "prefill_tokens_per_s=8000,token_ms=12,more_token_ms=0.2,slots=32"
#: How fast the prompt of a request is computed, the time before that, the time of a token, what it takes longer for
#: each other answer, how many requests a server runs at once (0: all), and how many it fails.
_NUMBERS = ("first_ms", "prefill_tokens_per_s", "token_ms", "more_token_ms", "slots", "failed_percent")
_FOLDER = Path(__file__).with_name("models")
_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<where>.*)`$", re.S)


def built_in_cost_models() -> list[str]:
    """Names of the models that come with eventlm, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_cost_model(text: str, replicaset: str = "", *, on_progress: OnProgress | None = None) -> FileCost:
    """A cost model by its name, from a TOML file (`*.toml`), in numbers (`backends:`, see `parse_backends`), or fitted
    to a recorded run, or a replicaset of it: see `fit_trace`.

    `on_progress` gets the bytes of the run read, and their total. Raises UsageError that names the file and the key, or
    lists the built-in names; and what LogReader raises.
    """
    names = built_in_cost_models()
    if text in names:
        return _from_toml(_FOLDER / f"{text}.toml")
    if text.startswith(_BACKENDS):
        return parse_backends(text.removeprefix(_BACKENDS))
    path = Path(text)
    if path.suffix == ".toml":
        return _from_toml(path)
    if path.exists():
        return fit_trace(path, replicaset, on_progress=on_progress).model
    hint = did_you_mean(text, names, listed_as="built in")
    raise UsageError(
        f"no cost model {text!r}{hint}; or give a TOML file, a recorded run to fit one to, or other servers in numbers "
        f"({_BACKENDS}{_EXAMPLE})"
    )


def fit_trace(
    path: Path | str, replicaset: str = "", *, on_progress: OnProgress | None = None
) -> FittedCost | FittedBackends:
    """Fit to the steps of a trace or run folder, or to the answers of its backends, for workloads with other arrival
    times than the run. Of a run with several replicasets, to those of the one of this name.

    `on_progress` gets the bytes read, and their total. Raises UsageError, and what LogReader raises.
    """
    collector, forwards = StepCollector(), ForwardCollector()

    def take(event: Event) -> None:
        collector.apply(event)
        forwards.apply(event)

    with LogReader(path) as log:
        header = log.header
        names = [each.name for each in header.sets]
        if len(names) > 1 and replicaset not in names:
            raise UsageError(
                f"{path}: a cost model is fitted to the replicaset of its name, and the run has {', '.join(names)}; "
                "give each simulated replicaset one of these names, or a cost_model of its own"
            )
        log.fold(take, on_progress=on_progress)
    index = names.index(replicaset) if len(names) > 1 else 0
    whose = f"the replicaset {replicaset}" if len(names) > 1 else "it"
    core = header.sets[index].core
    if core.forwards is not UNSET:
        try:
            return fit_backends(*forwards_of_sets(header, forwards)[index])
        except UsageError as error:
            raise UsageError(f"{path}: {whose} has backends, and {error}") from error
    steps = by_set(header, collector.steps)[index]
    if not steps:
        raise UsageError(f"{path}: {whose} has no completed step to fit a cost model to")
    return fit_cost(steps, follows_run=False, num_groups=core.groups)


def parse_backends(text: str) -> BackendsCost:
    """A model of other servers that are all alike, in numbers: `KEY=NUMBER,...` of _NUMBERS. Raises UsageError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        where = f"{_BACKENDS}{text}"
        if key not in _NUMBERS:
            raise UsageError(f"{where}: unknown key {key!r}{did_you_mean(key, _NUMBERS, listed_as='known')}")
        try:
            found[key] = float(value)
        except ValueError:
            found[key] = -1.0
        if not 0 <= found[key] <= 1e9:
            raise UsageError(f"{where}: {key} must be a number from 0 to 1e9, such as {_BACKENDS}{_EXAMPLE}")
    rate = found.get("prefill_tokens_per_s", 0.0)
    failed_ppm = min(round(found.get("failed_percent", 0.0) * 10_000), 1_000_000)
    return BackendsCost(
        backends=[
            BackendCost(
                first_ns=round(found.get("first_ms", 0.0) * 1e6),
                prefill_ps=round(1e12 / rate) if rate else 0,
                token_ps=max(round(found.get("token_ms", 0.0) * 1e9), 1),
                token_running_ps=round(found.get("more_token_ms", 0.0) * 1e9),
                slots=round(found.get("slots", 0)),
                failures=[FailureRate(kind="server", rate_ppm=failed_ppm, status=500)] if failed_ppm else [],
            )
        ]
    )


def _from_toml(path: Path) -> FileCost:
    table = read_toml(path, what="the cost model")
    try:
        cost: FileCost = msgspec.convert(table, FileCost)
        return cost
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        where = f"{path}, {found['where']}" if found and found["where"] else str(path)
        raise UsageError(f"{where}: {lower_first(found['what'] if found else str(error))}") from None
