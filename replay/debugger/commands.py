"""The commands: a table of names, arguments, help and functions. A prompt, programs and pages send the same ones.

A function takes the navigator and the text after the command's name, and gives a result.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from eventlm.config.options import did_you_mean
from eventlm.errors import UsageError
from eventlm.formatting import counted, sentence
from eventlm.replay.debugger import views
from eventlm.replay.debugger.condition import CALLS, GAUGES, SHARED, STATE, Condition
from eventlm.replay.debugger.environment import find_sequence
from eventlm.replay.debugger.event_fields import ALIASES, COMMON, FIELDS
from eventlm.replay.debugger.navigator import Navigator
from eventlm.replay.debugger.places import (
    POINTS,
    UNITS_OF_MOVES,
    event_number,
    find_place,
    move_positions,
    sequence_of,
    whole_number,
)
from eventlm.replay.debugger.questions import BRANCH_FLAGS, BRANCH_USAGE, branch_here, show_plan, story, why
from eventlm.replay.debugger.records import marks, recorded_sequence
from eventlm.replay.debugger.results import Result, TableResult, TextResult, seconds

_MOVE = re.compile(r"(?:([0-9][0-9_,]*)\s*)?([a-z]+)?")
_MAX_BREAKPOINTS = 32


class Command(NamedTuple):
    """usage: how it is written. detail: more help. words: that may follow it. is_expression: an expression does."""

    run: Callable[[Navigator, str], Result]
    usage: str
    summary: str
    detail: list[str] = []
    words: tuple[str, ...] = ()
    takes_expression: bool = False


def run_command(navigator: Navigator, line: str) -> Result:
    """Run a command. Raises UsageError for what is none."""
    name, _, argument = line.strip().partition(" ")
    found = find_command(name)
    navigator.interrupt.begin()
    return found.run(navigator, argument.strip())


def find_command(name: str) -> Command:
    """By its name or short name. Raises UsageError."""
    full = SHORT.get(name, name)
    if full not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        raise UsageError(f"there is no command {name!r}{hint}; `help` lists all" if name else "`help` lists commands")
    return COMMANDS[full]


def _move(navigator: Navigator, argument: str, direction: int) -> Result:
    found = _MOVE.fullmatch(argument)
    unit = (found[2] if found else None) or "event"
    if found is None or unit.removesuffix("s") not in UNITS_OF_MOVES:
        hint = did_you_mean(found[2], UNITS_OF_MOVES, listed_as="there are") if found and found[2] else ""
        raise UsageError(f"{argument!r} is no number of events, drains, steps or launches{hint}")
    digits = (found[1] or "1").translate(str.maketrans("", "", "_,"))
    amount = int(digits) if len(digits) < 16 else 1 << 60
    if amount < 1:
        raise UsageError("the number must be at least 1")
    unit = unit.removesuffix("s")
    target, left = _moved(navigator, unit, amount * direction)
    if target is None and direction > 0 and navigator.read_on():
        target, left = _moved(navigator, unit, amount * direction)
    if target is not None:
        return navigator.move_to(target)
    way = "follow" if direction > 0 else "precede"
    if not left:
        end = "the last" if direction > 0 else "the first"
        what = "" if unit == "event" else f"no {unit} {way}s it; "
        here = f"event {navigator.position:,}" + (f" is {end} of the run" if unit == "event" else "")
        raise UsageError(f"{what}{here}" if unit == "event" else f"no {unit} {way}s {here}")
    raise UsageError(f"only {counted(left, unit)} {way if left > 1 else way + 's'} event {navigator.position:,}")


def _moved(navigator: Navigator, unit: str, amount: int) -> tuple[int | None, int]:
    """The event so many units away; None if there are only so many."""
    events, s = navigator.events, navigator.position
    if unit == "event":
        found = events.moved(s, amount)
        if found is not None:
            return found, 0
        end = events.last_s if amount > 0 else events.first_s
        missing = sum(last - first + 1 for first, last in events.gaps if min(s, end) < first <= max(s, end))
        return None, abs(end - s) - missing
    positions = move_positions(navigator.index, unit)
    if amount > 0:
        start = int(np.searchsorted(positions, s, side="right"))
        left = len(positions) - start
        return (int(positions[start + amount - 1]), 0) if left >= amount else (None, left)
    left = int(np.searchsorted(positions, s, side="left"))
    return (int(positions[left + amount]), 0) if left >= -amount else (None, left)


def _goto(navigator: Navigator, argument: str) -> Result:
    words = argument.split()
    if words == ["end"] or not words:
        navigator.read_on()
    try:
        place = find_place(navigator.index, words)
    except UsageError:
        if not navigator.read_on():
            raise
        place = find_place(navigator.index, words)
    return navigator.move_to(place)


def _condition(navigator: Navigator, argument: str, command: str) -> Condition:
    if not argument:
        raise UsageError(f"{command} needs an expression, such as {command} free < 5 and running > 3")
    return navigator.check(Condition(argument))


def _find(navigator: Navigator, argument: str, *, forward: bool) -> Result:
    condition = _condition(navigator, argument, "find" if forward else "rfind")
    found = navigator.search(condition, mode="level", forward=forward)
    if found is None:
        raise UsageError(_nothing(navigator, condition, forward=forward))
    return navigator.move_to(found, f"found: {condition.text}")


def _nothing(navigator: Navigator, condition: Condition, *, forward: bool) -> str:
    end, way = (navigator.events.last_s, "after") if forward else (navigator.events.first_s, "before")
    return f"nothing found: no event {way} {navigator.position:,}, up to {end:,}, has {condition.text}"


def _break(navigator: Navigator, argument: str) -> Result:
    if not argument:
        return _breakpoints(navigator)
    condition = _condition(navigator, argument, "break")
    if len(navigator.breakpoints) >= _MAX_BREAKPOINTS:
        raise UsageError(f"there are {_MAX_BREAKPOINTS} breakpoints; delete some")
    number = next(navigator.numbers)
    navigator.breakpoints[number] = condition
    how = {"columns": "the index's columns", "lines": "the lines of the log", "core": "applying events again"}
    return TextResult(text=[f"breakpoint {number}: {condition.text} (answered by {how[condition.source]})"])


def _delete(navigator: Navigator, argument: str) -> Result:
    if argument in ("", "all"):
        number = len(navigator.breakpoints)
        navigator.breakpoints.clear()
        return TextResult(text=[f"deleted {counted(number, 'breakpoint')}"])
    number = whole_number(argument, "a breakpoint")
    if number not in navigator.breakpoints:
        known = ", ".join(map(str, navigator.breakpoints)) or "none"
        raise UsageError(f"there is no breakpoint {number}; there are: {known}")
    del navigator.breakpoints[number]
    return TextResult(text=[f"deleted breakpoint {number}"])


def _breakpoints(navigator: Navigator) -> TableResult:
    return TableResult(
        title=counted(len(navigator.breakpoints), "breakpoint"),
        columns=["number", "expression", "answered by"],
        rows=[[number, each.text, each.source] for number, each in navigator.breakpoints.items()],
    )


def _continue(navigator: Navigator, argument: str, *, forward: bool) -> Result:
    name = "cont" if forward else "rcont"
    if argument:
        raise UsageError(f"{name} takes no argument; `find EXPR` goes to an event without a breakpoint")
    if not navigator.breakpoints:
        raise UsageError(f"there is no breakpoint to run to; set one, such as break free < 5; then {name}")
    hits: dict[int, list[str]] = {}
    for number, condition in navigator.breakpoints.items():
        limit = None if not hits else min(hits) if forward else max(hits)
        s = navigator.search(condition, mode="edge", forward=forward, limit=limit)
        if s is not None:
            hits.setdefault(s, []).append(f"breakpoint {number}: {condition.text}")
    if not hits:
        way = f"after event {navigator.position:,}" if forward else f"before event {navigator.position:,}"
        raise UsageError(f"no breakpoint is reached {way}; the position is what it was")
    at = min(hits) if forward else max(hits)
    return navigator.move_to(at, *hits[at])


def _watch(navigator: Navigator, argument: str, *, forward: bool) -> Result:
    name = "watch" if forward else "rwatch"
    condition = _condition(navigator, argument, name)
    if condition.reads_events:
        raise UsageError(
            f"{name} needs what lasts from event to event, and {condition.text!r} is about one event; use find"
        )
    found = navigator.search(condition, mode="change", forward=forward)
    if found is None:
        way = f"after event {navigator.position:,}" if forward else f"before event {navigator.position:,}"
        raise UsageError(
            f"{condition.text} does not change {way}; it is {navigator.values(condition, navigator.position)}"
        )
    before = navigator.events.moved(found, -1)
    old = "unknown" if before is None else navigator.values(condition, before)
    new = navigator.values(condition, found)
    return navigator.move_to(found, f"{condition.text}: {old} -> {new}")


def _show(navigator: Navigator, argument: str) -> Result:
    what, _, rest = argument.partition(" ")
    words = rest.split()
    if what not in SHOWN:
        hint = did_you_mean(what, SHOWN) if what else ""
        raise UsageError(f"show {what or 'what'}?{hint} There are: {', '.join(SHOWN)}".replace("?;", "?"))
    if what in _OF_STATE:
        _no_words(words, f"show {what}")
        return _OF_STATE[what](navigator.core.state, navigator.where)
    return SHOWN[what](navigator, words)


def _show_request(navigator: Navigator, words: list[str]) -> Result:
    if len(words) != 1:
        raise UsageError("write show request N, or N.INDEX for one of several samples")
    request, sample = sequence_of(navigator.index, words[0])
    if navigator.index.facts.is_verified:
        found = find_sequence(navigator.core.state, request, sample)
        if found is not None:
            return views.sequence(navigator.core.state, found, navigator.where)
    return recorded_sequence(navigator.index, request, sample, navigator.position)


def _show_replica(navigator: Navigator, words: list[str]) -> Result:
    if len(words) > 1:
        raise UsageError("write show replica R")
    number = whole_number(words[0], "a replica") if words else 0
    return views.replica(navigator.core.state, number, navigator.where)


def _show_config(navigator: Navigator, words: list[str]) -> Result:
    _no_words(words, "show config")
    return views.config(navigator.index.header)


def _show_marks(navigator: Navigator, words: list[str]) -> Result:
    return marks(navigator.index, words, navigator.position)


def _show_plan(navigator: Navigator, words: list[str]) -> Result:
    _no_words(words, "show plan")
    return show_plan(navigator)


def _show_breakpoints(navigator: Navigator, words: list[str]) -> Result:
    _no_words(words, "show breakpoints")
    return _breakpoints(navigator)


def _no_words(words: list[str], command: str) -> None:
    if words:
        raise UsageError(f"{command} takes nothing more, not {' '.join(words)!r}")


def _diff(navigator: Navigator, argument: str) -> Result:
    words = argument.split()
    if not words or len(words) > 2:
        raise UsageError("write diff EVENT [EVENT]; the second is the position if it is left out")
    first = navigator.check_place(event_number(navigator.index, words[0]))
    second = navigator.position
    if len(words) == 2:
        second = navigator.check_place(event_number(navigator.index, words[1]))
    before = views.summary(navigator.cursor.core_at(first).state)
    after = views.summary(navigator.cursor.core_at(second).state)
    return views.difference(before, after, f"from event {first:,} to event {second:,}")


def _info(navigator: Navigator, argument: str) -> Result:
    _no_words(argument.split(), "info")
    index = navigator.index
    facts = index.facts
    lines = [
        f"run {index.header.run}: {index.path}",
        f"events {facts.first_s:,} to {facts.next_s - 1:,}, {seconds(facts.last_ns)}"
        + ("" if facts.is_ended else "; still being written, `goto end` reads on"),
        f"{counted(len(index.requests), 'sequence')}, {counted(len(index.steps), 'step')}, "
        f"{counted(len(index.drains), 'drain')}, {counted(len(index.marks), 'mark')}, "
        f"{counted(index.header.num_replicas, 'replica')}",
    ]
    lines += [f"events {first:,} to {last:,} are missing" for first, last in navigator.events.gaps]
    if not facts.is_verified:
        lines.append(facts.missing)
    lines += [f"warning: {each}" for each in facts.warnings]
    lines += [f"breakpoint {number}: {each.text}" for number, each in navigator.breakpoints.items()]
    return TextResult(text=[*lines, *navigator.stop_at(navigator.position).lines()])


def _help(navigator: Navigator, argument: str) -> Result:
    if argument in ("expressions", "EXPR"):
        return TextResult(text=_EXPRESSIONS)
    if argument:
        found = find_command(argument)
        return TextResult(text=[found.usage, sentence(found.summary), *found.detail])
    return TextResult(
        text=[
            *(
                f"{each.usage if each.usage is not BRANCH_USAGE else 'branch ...':<36}  {each.summary}"
                for each in COMMANDS.values()
            ),
            "`help COMMAND` has more, `help expressions` the names that EXPR may use.",
            "short: " + ", ".join(f"{short} {full}" for short, full in SHORT.items()),
        ]
    )


def _joined(names: object) -> str:
    return ", ".join(sorted(map(str, names)))  # type: ignore[call-overload]


_EXPRESSIONS = [
    "EXPR compares names with numbers and texts, and joins with and, or, not: free < 5 and running > 3.",
    "Numbers may have units: 12.5s, 20ms, 4k. Texts stand in quotes. What is not known makes a comparison false.",
    f"gauges of a replica, after each drain: {_joined(GAUGES)}; `replica == R` picks one, else any counts",
    f"of events: {_joined(COMMON)}, and their fields: "
    f"{_joined({name for fields in FIELDS.values() for name in fields} | set(ALIASES) - SHARED)}",
    f"events: {_joined(FIELDS)}",
    f"of the core's state: {_joined(STATE)}",
    f"req(N) or seq(N, I), a live sequence: {', '.join(CALLS['req'])}",
    f"replica(R): {', '.join(CALLS['replica'])}",
]
_OF_STATE = {
    "queue": views.queue,
    "running": views.running,
    "pool": views.pool,
    "tree": views.tree,
    "steps": views.steps,
    "timers": views.timers,
}
#: What `show` shows.
SHOWN: dict[str, Callable[[Navigator, list[str]], Result]] = {
    **dict.fromkeys(_OF_STATE, _show_config),
    "plan": _show_plan,
    "request": _show_request,
    "replica": _show_replica,
    "config": _show_config,
    "marks": _show_marks,
    "breakpoints": _show_breakpoints,
}
_MOVES = [
    "event: one line of the log. drain: the last fact of one, where plans are made.",
    "step: a completed step. launch: a step that begins.",
]
COMMANDS: dict[str, Command] = {
    "next": Command(
        lambda navigator, text: _move(navigator, text, 1),
        "next [N] [event|drain|step|launch]",
        "go forward",
        _MOVES,
        UNITS_OF_MOVES,
    ),
    "back": Command(
        lambda navigator, text: _move(navigator, text, -1),
        "back [N] [event|drain|step|launch]",
        "go back",
        _MOVES,
        UNITS_OF_MOVES,
    ),
    "goto": Command(
        _goto,
        "goto PLACE",
        "go to a time, an event, a step, a mark or a point of a request",
        [
            "goto 12.5s             the last event at or before that time of the run",
            "goto 1042              an event by its number",
            "goto step R:K          the launch of step K of replica R",
            "goto mark K            a mark, as `show marks` numbers them",
            "goto request N POINT   arrive, admit (to a replica), first (token), preempt [K], finish",
            "goto start, goto end   on a run that is still being written, `end` reads on",
        ],
        ("start", "end", "step", "mark", "request", *POINTS),
    ),
    "find": Command(
        lambda navigator, text: _find(navigator, text, forward=True),
        "find EXPR",
        "go to the next event at which an expression holds",
        takes_expression=True,
    ),
    "rfind": Command(
        lambda navigator, text: _find(navigator, text, forward=False),
        "rfind EXPR",
        "go to the last event before this one at which an expression holds",
        takes_expression=True,
    ),
    "break": Command(
        _break,
        "break [EXPR]",
        "set a breakpoint, or list them",
        [
            "It stops where the expression becomes true; one on events stops at each of them.",
        ],
        takes_expression=True,
    ),
    "delete": Command(_delete, "delete [NUMBER|all]", "delete a breakpoint, or all"),
    "cont": Command(
        lambda navigator, text: _continue(navigator, text, forward=True), "cont", "go on to the next breakpoint"
    ),
    "rcont": Command(
        lambda navigator, text: _continue(navigator, text, forward=False), "rcont", "go back to the last breakpoint"
    ),
    "watch": Command(
        lambda navigator, text: _watch(navigator, text, forward=True),
        "watch EXPR",
        "go to the next change of a value",
        ["The value may be any: watch req(17).tokens, watch policy, watch free < 5."],
        takes_expression=True,
    ),
    "rwatch": Command(
        lambda navigator, text: _watch(navigator, text, forward=False),
        "rwatch EXPR",
        "go back to the last change of a value",
        ["It answers what made a value what it is."],
        takes_expression=True,
    ),
    "show": Command(
        _show,
        "show WHAT",
        f"show {', '.join(SHOWN)}",
        [
            "show request N[.INDEX]   one sequence",
            "show replica [R]         one replica",
            "show marks [KIND]        preemptions, rejections, lost workers, notes and the like, numbered",
            "show queue               those that wait, in the order of the line",
            "show pool, show tree     blocks; prefixes that can be hit",
            "show plan                what the plans of this drain looked at, and what became of each",
        ],
        tuple(SHOWN),
    ),
    "diff": Command(_diff, "diff EVENT [EVENT]", "compare the states at two events"),
    "why": Command(
        why,
        "why N",
        "say why a request is in no step: every constraint, its place in line, who holds the blocks",
        ["why N.INDEX is for one of several samples. `show plan` has all that the latest plan looked at."],
    ),
    "story": Command(story, "story N [whole]", "tell what happened to a request so far, or in all", [], ("whole",)),
    "branch": Command(
        branch_here,
        BRANCH_USAGE,
        "run the rest of the run from here on under changes, and compare",
        [
            "branch --policy edf:multiplier=2",
            "branch --set max_num_batched_tokens=512 -o branches",
            "With -o the branch is kept as a trace, which every command reads.",
        ],
        BRANCH_FLAGS,
    ),
    "info": Command(_info, "info", "show the run, the breakpoints and the position"),
    "help": Command(_help, "help [COMMAND|expressions]", "explain a command, or the names of expressions"),
}
SHORT = {
    "n": "next",
    "b": "back",
    "g": "goto",
    "f": "find",
    "rf": "rfind",
    "c": "cont",
    "rc": "rcont",
    "w": "watch",
    "rw": "rwatch",
    "s": "show",
    "i": "info",
    "h": "help",
}
