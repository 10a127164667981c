"""Which policies a recorded run used, and how simulations treat swaps at run time (`policy` facts).

A report that compares a run with another policy must mention them: the record is then of several policies, the
alternative of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import Fact, Header, PolicySwapped, ReplicasetRecord
from eventlm.formatting import counted
from eventlm.types import NANOSECONDS_PER_SECOND

#: Swaps that are listed one by one.
MAX_LISTED = 4


class PolicySpan(Struct, frozen=True, kw_only=True):
    """A policy that was in force from a time of the run until the next. spec: with its parameters."""

    name: str
    spec: str
    from_ns: int


def recorded_policies(
    header: Header, start: StateSnapshot | None, external_facts: Sequence[Fact]
) -> list[list[PolicySpan]]:
    """By replicaset, in order. start: the initial state of a log that begins in the middle of the run."""
    return [
        _of_set(header.ts, record, start.sets[index].policy if start is not None else None, swaps)
        for index, record in enumerate(header.sets)
        for swaps in [[f for f in external_facts if isinstance(f, PolicySwapped) and f.replicaset in (-1, index)]]
    ]


def _of_set(
    began_ns: int, run: ReplicasetRecord, first: str | None, swaps: Sequence[PolicySwapped]
) -> list[PolicySpan]:
    records = [record for record in run.plugins if record.kind == "policy"]
    specs = {record.name: format_plugin_spec({"type": record.name} | record.parameters) for record in reversed(records)}
    found = [(began_ns, first if first is not None else records[0].name)]
    for fact in swaps:
        if fact.name != found[-1][1]:
            found.append((fact.ts, fact.name))
    return [PolicySpan(name=name, spec=specs.get(name, name), from_ns=ts) for ts, name in found]


def describe(spans: Sequence[PolicySpan], *, with_parameters: bool = False) -> str:
    """The policies in words: `fcfs, edf from 12.500 s on`."""
    listed = [
        (each.spec if with_parameters else each.name)
        + (f" from {each.from_ns / NANOSECONDS_PER_SECOND:,.3f} s on" if index else "")
        for index, each in enumerate(spans[: 1 + MAX_LISTED])
    ]
    num_more = len(spans) - len(listed)
    return ", ".join([*listed, *([f"and {counted(num_more, 'more swap')}"] if num_more else [])])


def what_if_note(spans: Sequence[PolicySpan], *, is_replaced: bool) -> str:
    """How an alternative treats the swaps; empty without swaps. is_replaced: it has a policy of its own."""
    if len(spans) == 1:
        return ""
    here = "; here its own policy runs from the start to the end" if is_replaced else ", and so does this one"
    return f"the policy was swapped at run time ({describe(spans)}); the recorded run and the baseline do that{here}"


def simulation_note(spans: Sequence[PolicySpan]) -> str:
    """How a simulation of the workload alone treats the swaps; empty without swaps."""
    if len(spans) == 1:
        return ""
    return (
        f"the run's policy was swapped at run time ({describe(spans)}), which is not repeated here: one policy runs "
        "from the start to the end (`eventlm replay` with another batcher, router or setting repeats it)"
    )
