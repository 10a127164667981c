"""Makes the report of a run: everything about it in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from eventlm.bus.log_reader import LogReader
from eventlm.bus.run_folder import TRACE_NAME, lasting_path
from eventlm.config import PluginSpec
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.look.findings.find import find_all
from eventlm.look.findings.finding import Finding
from eventlm.look.report import alternatives, overview, pair
from eventlm.look.report.backends import backend_rows
from eventlm.look.report.finding_cards import cards
from eventlm.look.report.measures import measure, percentile_rows
from eventlm.look.report.ranks import StageTimes, group_rows, stage_rows
from eventlm.look.report.series import over_time
from eventlm.look.report.timeline import request_columns, stretch_columns, timeline_data
from eventlm.look.report.worst import finding_rows, stories, worst_rows
from eventlm.page.document import single_file
from eventlm.page.linker import link, link_styles
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from eventlm.replay.index.window import windowed
from eventlm.replay.what_if.what_if import OnStage
from eventlm.types import OnProgress, TimeWindow

STATIC = resources.files(__package__) / "static"
#: A run whose first event is later than this share of it is shown from there.
_LATE_START = 10


class RunReport(NamedTuple):
    """A page, how many requests it has, what it finds first, and what to know of the trace."""

    html: str
    num_requests: int
    findings: list[Finding]
    warnings: list[str]


def make_report(
    path: str,
    *,
    other: str = "",
    policies: Sequence[PluginSpec] = (),
    window: TimeWindow | None = None,
    verify: bool = True,
    partial: bool = False,
    trust_local_plugins: bool = False,
    on_progress: OnProgress | None = None,
    on_stage: OnStage | None = None,
) -> RunReport:
    """The report of the run at `path`.

    other: a second run of the same workload, to compare with. policies: what they
    would have done. window: of a part of the run. verify, partial: as `open_index` has them.

    Raises DivergenceError, UsageError, and as LogReader and `what_if` do.
    """
    _check(other=other, policies=policies, window=window, partial=partial)
    # Before all that takes long: another run may be damaged.
    beside = pair.compare(path, other, on_progress=on_progress) if other else {}
    whole = open_index(
        path, verify=verify, partial=partial, trust_local_plugins=trust_local_plugins, on_progress=on_progress
    )
    if policies and whole.facts.damage:
        raise UsageError(f"--policy needs a whole trace: {whole.facts.damage}")
    index = whole if window is None else windowed(whole, window)
    findings = find_all(index)
    data = report_data(index, findings, path, window)
    if policies:
        data["whatIf"] = alternatives.ask(
            path, policies, window=window, trust_local_plugins=trust_local_plugins, on_progress=on_stage
        )
    if other:
        data["pair"] = beside
    warnings = list(dict.fromkeys([*index.facts.warnings, *beside.get("warnings", [])]))
    if index.facts.missing:
        warnings.append(index.facts.missing)
    html = single_file(f"{overview.title(index)} · eventlm", link("report.js", STATIC), link_styles(STATIC), data)
    return RunReport(html, overview.num_requests(index), findings, warnings)


def _check(*, other: str, policies: Sequence[PluginSpec], window: TimeWindow | None, partial: bool) -> None:
    """What would be refused only after a long time otherwise. Raises UsageError."""
    for policy in policies:
        resolve("policy", policy)
    if other and window is not None:
        raise UsageError("--from and --to are of one trace: two runs are compared as wholes; leave out TRACE_B")
    if other and partial:
        raise UsageError("--partial is of one trace: two runs are compared as wholes; leave out TRACE_B")


def report_data(index: Index, findings: list[Finding], path: str, window: TimeWindow | None) -> dict[str, Any]:
    """What the page draws. Rows are those of the index's `requests`, times ns after `base`."""
    measures = measure(index)
    name = lasting_path(path)
    base_ns = _base(index, window)
    stages = StageTimes(index)
    named, worst = finding_rows(index, findings), worst_rows(index, measures)
    return {
        "title": overview.title(index),
        "details": overview.details(index, base_ns, is_part=window is not None),
        "notices": overview.notices(index, base_ns),
        "path": name,
        "end": max(index.facts.last_ns - base_ns, 1),
        "findings": cards(index, findings, name, base_ns),
        "isVerified": index.facts.is_verified,
        "headline": overview.headline(index, measures, base_ns),
        "percentiles": percentile_rows(index, measures),
        "endings": overview.endings(index),
        "limits": overview.limits(index),
        "settings": overview.settings(index),
        "names": index.names,
        "timeline": timeline_data(index, stages, base_ns),
        "requests": request_columns(index, measures),
        "stretches": stretch_columns(index),
        "series": over_time(index, base_ns),
        "replicas": overview.replica_rows(index, base_ns),
        "backends": backend_rows(index, base_ns),
        "stages": stage_rows(index, stages, base_ns),
        "kvGroups": group_rows(index),
        "worst": list(dict.fromkeys([*worst, *named])),
        "stories": stories(index, list(dict.fromkeys([*named, *worst]))),
    }


def _base(index: Index, window: TimeWindow | None) -> int:
    """From when times are shown: the start of the run, unless that is not there."""
    if window is not None:
        return min(window.from_ns, index.facts.last_ns)
    first_ns = index.header.ts
    return first_ns if first_ns * _LATE_START > index.facts.last_ns else 0


def build_report(run_folder: Path, window: TimeWindow) -> str:
    """The page of a part of a run by the server that records it, whose plug-ins are trusted."""
    latest = run_folder / TRACE_NAME
    with LogReader(latest) as reader:
        # The latest file begins with the state, and is a trace by itself.
        is_enough = reader.header.ts <= window.from_ns
    return make_report(str(latest if is_enough else run_folder), window=window, trust_local_plugins=True).html
