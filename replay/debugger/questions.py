"""Questions that other tools answer, asked at a position: why a sequence waits, what the plan looked at, its story so
far, and what would have become of the rest of the run under another policy.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from eventlm.bus.log_reader import LogReader
from eventlm.config.options import did_you_mean
from eventlm.config.plugin_spec import parse_parameters, parse_plugin_spec
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.replay.branch.branch import branch
from eventlm.replay.branch.point import BranchPoint
from eventlm.replay.branch.report import render
from eventlm.replay.branch.report import to_object as branch_object
from eventlm.replay.debugger.navigator import Navigator
from eventlm.replay.debugger.places import sequence_of
from eventlm.replay.debugger.results import ReportResult
from eventlm.replay.debugger.stories import explain_until
from eventlm.replay.explain.story import describe
from eventlm.replay.rebuild import Changes
from eventlm.replay.why.describe import describe_next_step, describe_why
from eventlm.replay.why.describe import to_object as why_object
from eventlm.replay.why.examiner import Examiner
from eventlm.replay.why.plan import describe_plan, plan_object

_PLUGINS = ("policy", "batcher", "router")
BRANCH_FLAGS = (*(f"--{kind}" for kind in _PLUGINS), "--set", "-o")
BRANCH_USAGE = "branch [--policy SPEC] [--batcher SPEC] [--router SPEC] [--set NAME=VALUE]... [-o FOLDER]"
#: Other names of settings, as on the command line.
_SHORT_NAMES = {"blocks": "num_blocks"}


def why(navigator: Navigator, argument: str) -> ReportResult:
    """Why a sequence is in no step, and when it was next in one."""
    if not argument or " " in argument:
        raise UsageError("write why N, or why N.INDEX for one of several samples")
    request, sample = sequence_of(navigator.index, argument)
    _check_planned(navigator)
    with LogReader(navigator.index.path) as reader:
        examiner = _examiner(navigator, reader)
        found = examiner.why(navigator.position, request, sample)
        following = None
        # Of a damaged trace only what precedes the damage is there.
        with contextlib.suppress(*([TraceCorruptError] if navigator.index.facts.damage else [])):
            following = examiner.next_step(navigator.position, request, sample)
    next_words = describe_next_step(following, found.now_ns)
    report: dict[str, Any] = why_object(found) | {"next_step": msgspec.to_builtins(following)}
    return ReportResult(text=[*describe_why(found), "", next_words], report=report)


def show_plan(navigator: Navigator) -> ReportResult:
    """What the plans of the position's drain looked at."""
    _check_planned(navigator)
    with LogReader(navigator.index.path) as reader:
        found = _examiner(navigator, reader).plan(navigator.position)
        text = list(describe_plan(found.state, found.turns))
        return ReportResult(text=[f"plan {navigator.where}", *text], report=plan_object(found.state, found.turns))


def _examiner(navigator: Navigator, reader: LogReader) -> Examiner:
    cursor = navigator.cursor
    assert navigator.index.rebuilt is not None
    return Examiner(reader, navigator.index.rebuilt, cursor.restored_before, check=navigator.interrupt.check)


def _check_planned(navigator: Navigator) -> None:
    """Raises UsageError inside a drain, whose plans are made at its end."""
    if not navigator.core.state.drain_open:
        return
    s = navigator.position
    end_s = navigator.index.end_of_drain(s)
    where = "the log ends before it does" if end_s is None else f"goto {end_s}, its end"
    raise UsageError(f"event {s:,} is inside a drain, whose facts are planned as one: {where}")


def story(navigator: Navigator, argument: str) -> ReportResult:
    """What happened to a sequence until the position, or in all."""
    words = argument.split()
    if not words or len(words) > 2 or words[1:] not in ([], ["whole"]):
        raise UsageError("write story N for what happened to a request so far, or story N whole")
    request, sample = sequence_of(navigator.index, words[0])
    last_s = navigator.events.last_s if words[1:] else navigator.position
    found = explain_until(navigator.index, request, sample, last_s, navigator.interrupt)
    cut = {} if words[1:] else {"cut": f"at event {last_s:,}"}
    return ReportResult(text=describe(found, **cut), report=msgspec.to_builtins(found))


class _BranchOptions(NamedTuple):
    changes: Changes
    output: str | None


def branch_here(navigator: Navigator, argument: str) -> ReportResult:
    """The rest of the run under changes, compared with what it was."""
    options = _branch_options(argument, trusts_plugins=navigator.trusts_plugins)
    _check_planned(navigator)

    def check(stage: str, done: int, total: int) -> None:
        navigator.interrupt.check()

    found = branch(
        navigator.index.path, BranchPoint.of(navigator.core), options.changes, output=options.output, on_progress=check
    )
    return ReportResult(text=render(found).splitlines(), report=branch_object(found))


def _branch_options(argument: str, *, trusts_plugins: bool) -> _BranchOptions:
    try:
        words = shlex.split(argument)
    except ValueError as error:
        raise UsageError(f"branch: {error}".lower()) from error
    plugins: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    output: str | None = None
    for flag, value in _pairs(words):
        if flag == "-o":
            output = value
        elif flag == "--set":
            settings |= {_SHORT_NAMES.get(name, name): each for name, each in parse_parameters(value).items()}
        else:
            plugins[flag.removeprefix("--")] = parse_plugin_spec(value)
    return _BranchOptions(Changes(settings=settings, trust_local_plugins=trusts_plugins, **plugins), output)


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    left = iter(words)
    for word in left:
        flag, has_value, value = word.partition("=")
        if flag not in BRANCH_FLAGS:
            raise UsageError(f"branch has no {word}{did_you_mean(flag, BRANCH_FLAGS)}; write {BRANCH_USAGE}")
        given = value if has_value else next(left, None)
        if given is None:
            raise UsageError(f"{flag} needs a value; write {BRANCH_USAGE}")
        yield flag, given
