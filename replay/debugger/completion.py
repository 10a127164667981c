"""What may follow the beginning of a command: for a prompt and for pages."""

from __future__ import annotations

import re
from typing import NamedTuple

from eventlm.replay.debugger.commands import COMMANDS, SHORT
from eventlm.replay.debugger.condition import CALLS, GAUGES, SHARED, STATE
from eventlm.replay.debugger.event_fields import FIELDS, NAMES

_WORD = re.compile(r"[A-Za-z_]\w*\Z")
_EVENT_TEXT = re.compile(r"event\s*[!=]=\s*([\"'])(\w*)\Z")
_ATTRIBUTE = re.compile(r"(\w+)\([^()]*\)\.(\w*)\Z")
_EXPRESSION_WORDS = sorted({*GAUGES, *SHARED, *STATE, *NAMES, "and", "or", "not", *(f"{name}(" for name in CALLS)})


class CommandCompletions(NamedTuple):
    """Words that may stand in place of the last `num_chars` characters."""

    num_chars: int
    words: list[str]


def complete(text: str) -> CommandCompletions:
    """The ways in which a line may go on that is typed up to here."""
    command, space, argument = text.lstrip().partition(" ")
    if not space:
        return _starting(command, [*COMMANDS, "quit"])
    found = COMMANDS.get(SHORT.get(command, command))
    if found is None:
        return CommandCompletions(0, [])
    if found.takes_expression:
        return _in_expression(argument)
    last = argument.rpartition(" ")[2]
    words = [*COMMANDS, "expressions"] if command in ("help", "h") else list(found.words)
    return _starting(last, words)


def _in_expression(text: str) -> CommandCompletions:
    if event := _EVENT_TEXT.search(text):
        return _starting(event[2], [f"{tag}{event[1]}" for tag in sorted(FIELDS)])
    if attribute := _ATTRIBUTE.search(text):
        return _starting(attribute[2], list(CALLS.get(attribute[1], ())))
    word = _WORD.search(text)
    return _starting(word[0] if word else "", _EXPRESSION_WORDS)


def _starting(start: str, words: list[str]) -> CommandCompletions:
    return CommandCompletions(len(start), [word for word in words if word.startswith(start)])
