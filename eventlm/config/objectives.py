"""Objectives for latencies (an SLO), as a load test, a what-if and a simulation are given them: `ttft=500,tpot=50`."""

from __future__ import annotations

from msgspec import Struct

from eventlm.config.plugin_spec import parse_parameters
from eventlm.errors import UsageError


class Objectives(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits in milliseconds that a request must keep to count for goodput; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def are_met_by(self, *, ttft_ns: int | None, tpot_ns: float | None, e2e_ns: int) -> bool:
        """Whether a request kept them all. One of a single token has no TPOT and keeps any, one without a first token
        keeps no limit for it.
        """
        if self.ttft is not None and (ttft_ns is None or ttft_ns > self.ttft * 1e6):
            return False
        if self.tpot is not None and (tpot_ns or 0) > self.tpot * 1e6:
            return False
        return self.e2e is None or e2e_ns <= self.e2e * 1e6


def parse_objectives(text: str) -> Objectives:
    """`ttft=500,tpot=50,e2e=2000`, in milliseconds. Raises UsageError."""
    limits: dict[str, float] = {}
    for name, value in parse_parameters(text, whole=f"--slo {text}").items():
        if name not in Objectives.__struct_fields__:
            raise UsageError(f"--slo {text!r}: {name} is none of {', '.join(Objectives.__struct_fields__)}")
        if isinstance(value, bool | str) or not value > 0:
            raise UsageError(f"--slo {text!r}: {name}={value} is not a number of milliseconds above 0")
        limits[name] = float(value)
    return Objectives(**limits)
