"""`eventlm chat`: a conversation in the terminal, with a model here or on a server."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eventlm.cli.config_flags import (
    add_config_flags,
    add_model_argument,
    given_options,
    with_config,
)
from eventlm.cli.engine_command import compose_and_warn, run_in_loop
from eventlm.cli.parser import Parser
from eventlm.config import Config
from eventlm.config.load import API_KEY_VARIABLE
from eventlm.config.options import options
from eventlm.config.state_folder import state_folder
from eventlm.errors import EventLMError, UsageError

if TYPE_CHECKING:
    from eventlm.cli.chat.backend import ChatBackend
    from eventlm.cli.chat.input import ChatInput
    from eventlm.cli.chat.session import ChatSession

OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
HISTORY_NAME = "chat_history"


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Talk to a model. Without --url it runs here, under the configuration below; with --url a server of\n"
        "OpenAI's API answers. Enter sends, Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.\n"
        "If input or output is not a terminal, each line is a message and only the answers are printed."
    )
    parser.usage = "eventlm chat [MODEL] [--url URL] [--system TEXT] [flags]"
    parser.epilog = f"""\
examples:
  eventlm chat --set temperature=0.2 --system "Answer in one sentence."
  eventlm chat Qwen/Qwen3-0.6B
  eventlm chat --url http://127.0.0.1:8000
  printf '%s\\n' "Name a colour." "Another one." | eventlm chat

What was typed is kept in {HISTORY_NAME} in the state folder ($EVENTLM_STATE, else
$XDG_STATE_HOME/eventlm, else ~/.local/state/eventlm), readable to you alone; --no-history keeps nothing."""
    add_model_argument(parser)
    group = parser.add_argument_group("chat")
    group.add_argument("--url", metavar="URL", help="talk to this server; MODEL then names one of its models")
    group.add_argument(
        "--api-key", metavar="KEY", help=f"key for --url; better set {API_KEY_VARIABLE} or {OPENAI_KEY_VARIABLE}"
    )
    group.add_argument("--system", default="", metavar="TEXT", help="system message")
    group.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="sampling parameter; may be repeated"
    )
    group.add_argument("--load", metavar="FILE", help="go on with a chat that /save wrote as JSON")
    group.add_argument(
        "--no-history",
        action="store_true",
        help=f"do not keep what is typed; else it is in {HISTORY_NAME} in the state folder, for the next chat",
    )
    add_config_flags(parser, without=("server", "gateway"))
    parser.set_defaults(run=with_config(run))


def run(config: Config, arguments: argparse.Namespace) -> int:
    """Chat until the end of the input; 1 if a message of a script failed."""
    _check_url_flags(arguments)
    return run_in_loop(config, _chat(config, arguments))


def _check_url_flags(arguments: argparse.Namespace) -> None:
    """Raise UsageError for flags that could have no effect."""
    if arguments.url is None:
        if arguments.api_key is not None:
            raise UsageError("--api-key is for --url; without it no server is asked")
        return
    given = [options()[name] for name in given_options(arguments)]
    others = [option.flag for option in given if option.name != "model" and option.section != "log"]
    if arguments.config is not None:
        others.append("--config")
    if others:
        raise UsageError(f"{others[0]} is for a model that runs here, but --url names a server")


async def _chat(config: Config, arguments: argparse.Namespace) -> int:
    """Run the chat as a task, which SIGTERM ends, and SIGINT where there is no answer to stop."""
    from eventlm.cli.chat.screen import Screen
    from eventlm.cli.chat.session import ChatSession

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session = ChatSession(_backend(config, arguments), Screen(interactive=interactive))
    _prepare(session, arguments)
    chat = asyncio.ensure_future(_converse(session, _input(session, keeps_history=not arguments.no_history)))
    received: list[int] = []

    def end(number: int) -> None:
        if number == signal.SIGINT and interactive and session.stop_answer():
            return
        received.append(number)
        chat.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    await asyncio.wait({chat})
    if chat.cancelled():
        return 128 + received[0]
    chat.result()
    return 1 if session.failed and not interactive else 0


def _backend(config: Config, arguments: argparse.Namespace) -> ChatBackend:
    """What answers. Raises UsageError, CheckpointError or PullError."""
    from eventlm.cli.chat.backend import LocalBackend, RemoteBackend

    if arguments.url is not None:
        key = arguments.api_key or os.environ.get(API_KEY_VARIABLE) or os.environ.get(OPENAI_KEY_VARIABLE) or ""
        return RemoteBackend(arguments.url, api_key=key, model=given_options(arguments).get("model", ""))

    composed = compose_and_warn(config)
    return LocalBackend(composed)


def _prepare(session: ChatSession, arguments: argparse.Namespace) -> None:
    """Apply the flags to the conversation. Raises UsageError, and EventLMError for parameters."""
    from eventlm.cli.chat.settings import parse_setting
    from eventlm.cli.chat.slash_commands import load_chat

    if arguments.load is not None:
        load_chat(session, Path(arguments.load))
    if arguments.system:
        session.conversation.system = arguments.system
    for assignment in arguments.set:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment}: is not of the form NAME=VALUE")
        session.parameters[name] = parse_setting(name, text)
    try:
        session.backend.check(session.parameters)
    except EventLMError as error:
        raise UsageError(str(error)) from error


def _input(session: ChatSession, *, keeps_history: bool) -> ChatInput:
    from eventlm.cli.chat.input import PipeInput, TerminalInput, open_history
    from eventlm.cli.chat.settings import settings
    from eventlm.cli.chat.slash_commands import COMMANDS

    if not session.screen.interactive:
        return PipeInput()
    history = open_history(state_folder() / HISTORY_NAME if keeps_history else None)
    return TerminalInput([f"/{name}" for name in COMMANDS], settings(), history)


async def _converse(session: ChatSession, lines: ChatInput) -> None:
    """Start the backend, then read and answer until the end of the input or `/quit`."""
    from eventlm.cli.chat.slash_commands import Leave

    backend, screen = session.backend, session.screen
    screen.note(f"{backend.opening} …")
    async with AsyncExitStack() as stack:
        with screen.busy():
            await stack.enter_async_context(backend)
        context = f", context {backend.max_model_len:,} tokens" if backend.max_model_len else ""
        screen.note(f"{backend.model}{context}; /help lists the commands, Ctrl-D leaves")
        with suppress(Leave):
            await _read_and_answer(session, lines)
    if backend.run_folder is not None:
        print(f"eventlm: recorded to {backend.run_folder}/trace.jsonl", file=sys.stderr)


async def _read_and_answer(session: ChatSession, lines: ChatInput) -> None:
    from eventlm.cli.chat.slash_commands import run_command

    interrupted = False
    while True:
        try:
            line = await lines.read()
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            session.screen.note("Ctrl-C again, or Ctrl-D, leaves")
            continue
        interrupted = False
        if line is None:
            return
        try:
            if line.strip() and not await run_command(session, line):
                await session.say(line)
        except EventLMError as error:
            session.fail(str(error))
