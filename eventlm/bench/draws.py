"""What a load test draws: random streams, lengths of prompts and outputs, times of arrival.

A length is a number of tokens, or a distribution such as `lognormal:median=200,sigma=0.6`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from itertools import accumulate, repeat
from typing import Any, Literal, NamedTuple

import numpy

from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.errors import UsageError

ArrivalProcess = Literal["poisson", "gamma", "constant"]

#: Parameters of each distribution; those with a value may be left out.
_PARAMETERS: dict[str, dict[str, float | None]] = {
    "fixed": {"length": None},
    "uniform": {"min": None, "max": None},
    "normal": {"mean": None, "std": None, "min": 1, "max": math.inf},
    "lognormal": {"median": None, "sigma": None, "min": 1, "max": math.inf},
}
USAGE = "N, uniform:min=N,max=N, normal:mean=X,std=X or lognormal:median=X,sigma=X (the last two take min=, max= too)"


def random_stream(seed: int, *name: str | int) -> numpy.random.Generator:
    """The stream of `name` under `seed`.

    Streams are independent: a longer run begins like a shorter one, and a change of the arrivals leaves the prompts as
    they are.
    """
    path = [part if isinstance(part, int) else zlib.crc32(part.encode()) for part in name]
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence(seed, spawn_key=path)))


class Lengths(NamedTuple):
    """A distribution of lengths in tokens, each at least 1."""

    kind: str
    parameters: dict[str, float]

    def draw(self, random: numpy.random.Generator) -> int:
        """Draw one length."""
        value = _DRAW[self.kind](random, self.parameters)
        limited = min(max(value, self.parameters.get("min", 1)), self.parameters.get("max", math.inf))
        return max(round(limited), 1)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.parameters['length']:g}"
        defaults = _PARAMETERS[self.kind]
        shown = [f"{name}={value:g}" for name, value in self.parameters.items() if value != defaults[name]]
        return f"{self.kind}:{','.join(shown)}"


def parse_lengths(text: str, flag: str) -> Lengths:
    """Parse a distribution. Raises UsageError that names `flag`."""
    is_number = text.strip().lstrip("+-").isdigit()
    spec: dict[str, Any] = {"type": "fixed", "length": int(text)} if is_number else parse_plugin_spec(text)
    kind = spec.pop("type")
    if kind not in _PARAMETERS:
        raise UsageError(f"{flag} {text!r} is not a length; write {USAGE}")
    known = _PARAMETERS[kind]
    for name, value in spec.items():
        if name not in known or isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{flag} {text!r}: {name}={value} is no parameter of {kind}; it takes {', '.join(known)}")
    missing = [name for name, default in known.items() if default is None and name not in spec]
    if missing:
        raise UsageError(f"{flag} {text!r}: {', '.join(missing)} is missing; write {USAGE}")
    parameters = {name: float(spec.get(name, default or 0)) for name, default in known.items()}
    _check(parameters, f"{flag} {text!r}")
    return Lengths(kind, parameters)


def _check(parameters: dict[str, float], where: str) -> None:
    """Raise UsageError for parameters out of range."""
    for name in ("length", "min", "max", "mean", "median"):
        if parameters.get(name, 1) < 1:
            raise UsageError(f"{where}: {name} must be at least 1 token")
    for name in ("std", "sigma"):
        if parameters.get(name, 0) < 0:
            raise UsageError(f"{where}: {name} must not be below 0")
    if parameters.get("min", 1) > parameters.get("max", math.inf):
        raise UsageError(f"{where}: min is above max")


_DRAW: dict[str, Callable[[numpy.random.Generator, dict[str, float]], float]] = {
    "fixed": lambda random, p: p["length"],
    "uniform": lambda random, p: float(random.integers(int(p["min"]), int(p["max"]), endpoint=True)),
    "normal": lambda random, p: float(random.normal(p["mean"], p["std"])),
    "lognormal": lambda random, p: float(random.lognormal(math.log(p["median"]), p["sigma"])),
}


def arrival_times(
    process: ArrivalProcess, requests_per_second: float, *, burstiness: float, random: numpy.random.Generator
) -> Iterator[float]:
    """Endless arrival times in seconds after the start; the first is one interval after it.

    Intervals are exponential (`poisson`), gamma distributed with shape `burstiness` (`gamma`: 1 is Poisson, less is
    burstier, more is more regular; `vllm bench serve` means the same by it), or all equal (`constant`). Their mean is
    1 / requests_per_second; at an infinite rate all arrive at 0. Raises UsageError.
    """
    if not requests_per_second > 0:
        raise UsageError(f"--request-rate {requests_per_second:g} is not above 0; `inf` sends everything at once")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise UsageError(f"--burstiness {burstiness:g} is not a number above 0; 1 is a Poisson process")
    if math.isinf(requests_per_second):
        return repeat(0.0)
    mean_s = 1 / requests_per_second
    shape = 1.0 if process == "poisson" else burstiness
    intervals = (mean_s if process == "constant" else float(random.gamma(shape, mean_s / shape)) for _ in repeat(None))
    return accumulate(intervals)
