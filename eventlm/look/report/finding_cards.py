"""Findings as cards: with figures, where to look, and what to type."""

from __future__ import annotations

import shlex
from typing import Any

from eventlm.look.findings.find import may_follow
from eventlm.look.findings.finding import Finding
from eventlm.look.report.timeline import request_name
from eventlm.look.words import percent, seconds
from eventlm.replay.index.index import Index

_MAX_REQUESTS = 8
#: Shares of the run from which on a finding is serious, and from which on it is shown as one to look at.
_SERIOUS_PPM = 150_000


def cards(index: Index, findings: list[Finding], path: str, base_ns: int) -> list[dict[str, Any]]:
    """For each finding what the page shows of it. path: how commands name the run."""
    options = shlex.quote(path)
    if any(":" in record.name for each in index.header.sets for record in each.plugins):
        options += " --trust-local-plugins"
    return [
        _card(index, finding, options, base_ns, is_consequence=may_follow(finding, findings)) for finding in findings
    ]


def _card(index: Index, finding: Finding, options: str, base_ns: int, *, is_consequence: bool) -> dict[str, Any]:
    is_serious = finding.impact_ppm >= _SERIOUS_PPM and not is_consequence
    requests = []
    for request, number in finding.requests[:_MAX_REQUESTS]:
        row = index.find_row(request, number)
        if row is not None:
            samples = int(index.requests["samples"][row])
            requests.append({"row": row, "name": request_name(request, number, samples)})
    return {
        "kind": finding.kind,
        "title": finding.title,
        "text": finding.text,
        "culprit": finding.culprit,
        "culpritLabel": "Limit" if is_consequence else "Culprit",
        "tone": "bad" if is_serious else "warning",
        "verdict": "serious" if is_serious else "look",
        "figures": [_figure(name, value) for name, value in finding.figures.items()],
        "requests": requests,
        "at": finding.ts - base_ns if finding.ts >= base_ns else None,
        "commands": _commands(finding, options),
        "debuggerCommands": _debugger_commands(finding),
    }


def _debugger_commands(finding: Finding) -> list[str]:
    """What shows more of it in the debugger."""
    return [f"goto {finding.s}"] * (finding.s >= 0) + [finding.command] * bool(finding.command)


def _commands(finding: Finding, options: str) -> list[str]:
    """What shows more of it in the shell, and how its first request fared."""
    found = []
    if commands := _debugger_commands(finding):
        found.append(" ".join([f"eventlm debug {options}", *(f"-c {shlex.quote(each)}" for each in commands)]))
    if finding.requests:
        request, number = finding.requests[0]
        found.append(f"eventlm explain {options} {request}{f'.{number}' if number else ''}")
    return found


def _figure(name: str, value: int) -> dict[str, str]:
    """Units are in names: `wait_share_ppm` is a share."""
    if name.endswith("_ppm"):
        return {"label": name.removesuffix("_ppm").replace("_", " "), "value": percent(value)}
    if name.endswith("_ns"):
        return {"label": name.removesuffix("_ns").replace("_", " "), "value": seconds(value)}
    return {"label": name.removeprefix("num_").replace("_", " "), "value": f"{value:,}"}
