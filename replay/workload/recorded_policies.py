"""Which policies a recorded run had, and what a simulation of its work makes of a swap at run time.

An engine may be told at run time to go on with another of its policies (a `policy` fact). Whoever asks what another
policy would have done must know of it: the record is then of several policies, and the alternative of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.core.snapshot import StateSnapshot
from eventlm.events import Fact, Header, PolicySwapped
from eventlm.formatting import counted
from eventlm.types import NANOSECONDS_PER_SECOND

#: So many swaps are told one by one.
MAX_TOLD = 4


class PolicySpan(Struct, frozen=True, kw_only=True):
    """A policy that ran from a time of the run until the next one's. spec: with its parameters."""

    name: str
    spec: str
    from_ns: int


def recorded_policies(header: Header, start: StateSnapshot | None, incidents: Sequence[Fact]) -> list[PolicySpan]:
    """In their order. start: the state in which a log begins that begins in the middle of the run."""
    specs = {
        record.name: format_plugin_spec({"type": record.name} | record.parameters)
        for record in reversed(header.plugins)
        if record.kind == "policy"
    }
    first = next(record.name for record in header.plugins if record.kind == "policy")
    found = [(header.ts, start.policy if start is not None else first)]
    for fact in incidents:
        if isinstance(fact, PolicySwapped) and fact.name != found[-1][1]:
            found.append((fact.ts, fact.name))
    return [PolicySpan(name=name, spec=specs.get(name, name), from_ns=ts) for ts, name in found]


def describe(spans: Sequence[PolicySpan], *, with_parameters: bool = False) -> str:
    """The policies in words: `fcfs, edf from 12.500 s on`."""
    told = [
        (each.spec if with_parameters else each.name) + (f" from {_seconds(each)} on" if place else "")
        for place, each in enumerate(spans[: 1 + MAX_TOLD])
    ]
    num_untold = len(spans) - len(told)
    return ", ".join([*told, *([f"and {counted(num_untold, 'more swap')}"] if num_untold else [])])


def what_if_note(spans: Sequence[PolicySpan], *, is_replaced: bool) -> str:
    """What an alternative makes of the swaps. is_replaced: it has a policy of its own. Empty: there were none."""
    if len(spans) == 1:
        return ""
    here = "; here its own policy runs from the start to the end" if is_replaced else ", and so does this one"
    return f"the policy was swapped at run time ({describe(spans)}); the recorded run and the baseline do that{here}"


def simulation_note(spans: Sequence[PolicySpan]) -> str:
    """What a simulation of the workload alone makes of the swaps. Empty: there were none."""
    if len(spans) == 1:
        return ""
    return (
        f"the run's policy was swapped at run time ({describe(spans)}), which is not repeated here: one policy runs "
        "from the start to the end (`eventlm replay` with another batcher, router or setting repeats it)"
    )


def _seconds(span: PolicySpan) -> str:
    return f"{span.from_ns / NANOSECONDS_PER_SECOND:,.3f} s"
