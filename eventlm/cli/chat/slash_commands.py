"""The commands of a chat: lines that start with a slash."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from eventlm.cli.chat.conversation import SavedChat, load, save
from eventlm.cli.chat.session import ChatSession
from eventlm.cli.chat.settings import check_name, check_settings, parse_setting, settings, shown
from eventlm.config.options import nearest
from eventlm.errors import UsageError
from eventlm.formatting import counted

#: `/usr/bin` is no command.
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)
_ALIASES = {"exit": "quit"}
_KEYS = """\
Enter sends; Alt-Enter, or a backslash at the end, begins a new line.
Pasted text may have many lines. Tab completes, the arrows bring back what was typed.
Ctrl-C stops an answer or empties the line; twice on an empty line, or Ctrl-D, leaves."""


class Leave(Exception):
    """`/quit`."""


class SlashCommand(NamedTuple):
    """A command: its function, its usage, and its description."""

    run: Callable[[ChatSession, str], Awaitable[None]]
    usage: str
    summary: str


async def run_command(session: ChatSession, line: str) -> bool:
    """Run the command in `line`; False if it is none. Raises Leave, and EventLMError for a mistake."""
    match = _COMMAND.fullmatch(line.rstrip())
    if match is None:
        return False
    name, argument = _ALIASES.get(match[1], match[1]), (match[2] or "").strip()
    if name not in COMMANDS:
        guess = nearest(name, COMMANDS)
        hint = f"did you mean /{guess}?" if guess else "/help lists them"
        raise UsageError(f"unknown command /{name}; {hint} (a space before it sends it as text)")
    await COMMANDS[name].run(session, argument)
    return True


async def _help(session: ChatSession, argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for command in COMMANDS.values():
        session.screen.line(f"{command.usage:<{width}}  {command.summary}")
    session.screen.line(_KEYS)


async def _system(session: ChatSession, argument: str) -> None:
    if not argument:
        session.screen.line(session.conversation.system or "no system message; /system TEXT sets one")
        return
    session.conversation.system = "" if argument == '""' else argument
    session.screen.note("the system message is gone" if argument == '""' else "the system message is set")


async def _set(session: ChatSession, argument: str) -> None:
    name, _, text = argument.replace("=", " ", 1).partition(" ")
    if not name:
        _show_settings(session)
    elif not text.strip():
        check_name(name)
        session.screen.line(f"{name} = {shown(session.parameters[name]) if name in session.parameters else 'default'}")
    elif text.strip() == "default":
        check_name(name)
        session.parameters.pop(name, None)
    else:
        changed = session.parameters | {name: parse_setting(name, text.strip())}
        session.backend.check(changed)
        session.parameters = changed
        session.screen.note(f"{name} = {shown(changed[name])}")


def _show_settings(session: ChatSession) -> None:
    for name, value in session.parameters.items():
        session.screen.line(f"{name} = {shown(value)}")
    if not session.parameters:
        session.screen.line("every parameter has the model's own value")
    others = sorted(set(settings()) - set(session.parameters))
    session.screen.note(f"can be set: {', '.join(others)}; `/set NAME default` takes one back")


async def _clear(session: ChatSession, argument: str) -> None:
    session.conversation.turns.clear()
    session.unanswered = None
    session.screen.note("the conversation starts anew" + ("; system message kept" * bool(session.conversation.system)))


async def _undo(session: ChatSession, argument: str) -> None:
    text = session.conversation.undo()
    if text is None:
        raise UsageError("there is nothing to take back")
    session.screen.note(f"taken back: {_first_line(text)}")


async def _retry(session: ChatSession, argument: str) -> None:
    text = session.unanswered
    before = list(session.conversation.turns)
    if text is None:
        text = session.conversation.undo()
    if text is None:
        raise UsageError("there is no message to answer again")
    await session.say(text)
    if session.unanswered is not None and len(session.conversation.turns) < len(before):
        session.conversation.turns, session.unanswered = before, None
        session.screen.note("the answer before it stays")


async def _history(session: ChatSession, argument: str) -> None:
    if not session.conversation.messages():
        session.screen.line("there is no message yet")
    for message in session.conversation.messages():
        session.screen.line(f"{message['role']}: {message['content']}")


async def _save(session: ChatSession, argument: str) -> None:
    path = _path(argument, "/save FILE.json, or FILE.md")
    if path.exists() and path.resolve() not in session.own_files:
        raise UsageError(f"{path} exists and is not of this chat; choose another name")
    save(path, session.backend.model, SavedChat(session.conversation, session.parameters))
    session.own_files.add(path.resolve())
    session.screen.note(f"saved to {path}")


async def _load(session: ChatSession, argument: str) -> None:
    load_chat(session, _path(argument, "/load FILE.json"))
    session.screen.note(f"loaded {counted(len(session.conversation.turns), 'message')}; /history shows them")


def load_chat(session: ChatSession, path: Path) -> None:
    """Put a saved chat in the place of the session's. Raises UsageError, and EventLMError for its parameters."""
    chat = load(path)
    parameters = check_settings(chat.parameters)
    session.backend.check(parameters)
    session.conversation, session.parameters, session.unanswered = chat.conversation, parameters, None
    session.own_files.add(path.resolve())


async def _quit(session: ChatSession, argument: str) -> None:
    raise Leave


def _path(argument: str, usage: str) -> Path:
    if not argument:
        raise UsageError(f"no file given: {usage}")
    return Path(argument).expanduser()


def _first_line(text: str) -> str:
    head = text.strip().partition("\n")[0]
    return head if len(head) <= 60 else head[:59] + "…"


COMMANDS = {
    "help": SlashCommand(_help, "/help", "this list"),
    "system": SlashCommand(_system, "/system TEXT", 'set the system message; "" removes it, without TEXT it is shown'),
    "set": SlashCommand(_set, "/set NAME VALUE", "set a sampling parameter, such as temperature 0.2; alone, show them"),
    "clear": SlashCommand(_clear, "/clear", "forget the conversation, keep system message and parameters"),
    "undo": SlashCommand(_undo, "/undo", "take back the last message and its answer"),
    "retry": SlashCommand(_retry, "/retry", "answer the last message again"),
    "history": SlashCommand(_history, "/history", "show the conversation"),
    "save": SlashCommand(_save, "/save FILE", "write the chat: .json is the body of a request, .md is to be read"),
    "load": SlashCommand(_load, "/load FILE", "go on with a chat saved as JSON"),
    "quit": SlashCommand(_quit, "/quit", "leave; /exit does too"),
}
