"""Where a chat's lines come from: a person at a terminal, or a pipe."""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
import termios
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    get_common_complete_suffix,
)
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from eventlm.errors import UsageError

_CHUNK_BYTES = 65536
#: Commands whose argument is a file.
_FILE_COMMANDS = ("/save", "/load")


class TerminalInput:
    """A line editor with history and completion. Enter sends; Alt-Enter and a backslash at the end begin a new line.

    Pasted text stays as it is and is not sent before Enter.
    """

    def __init__(self, commands: Iterable[str], settings: Iterable[str], history: History) -> None:
        completer = ChatCompleter(commands, settings)
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("ansiblue bold", "> ")]),
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(completer),
            completer=completer,
            complete_while_typing=False,
            reserve_space_for_menu=4,
            history=history,
            enable_open_in_editor=False,
        )

    async def read(self) -> str | None:
        """The next message or command, which may have several lines; None at the end.

        Raises KeyboardInterrupt for Ctrl-C in an empty line.
        """
        try:
            return await self._session.prompt_async(handle_sigint=False)
        except EOFError:
            return None


class PipeInput:
    """Standard input line by line; one that ends in a backslash goes on in the next."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at_end = False

    async def read(self) -> str | None:
        """As `TerminalInput.read`."""
        lines = []
        while (line := await self._line()) is not None:
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return "\n".join(lines) if lines else None

    async def _line(self) -> str | None:
        while "\n" not in self._text and not self._at_end:
            chunk = await self._chunk()
            self._at_end = not chunk
            try:
                self._text += self._decoder.decode(chunk, final=self._at_end)
            except UnicodeDecodeError as error:
                raise UsageError(f"standard input is not valid UTF-8: {error.reason}") from error
        if not self._text:
            return None
        line, _, self._text = self._text.partition("\n")
        return line.removesuffix("\r")

    async def _chunk(self) -> bytes:
        if self._chunks is None:
            self._chunks = asyncio.Queue()
            # A thread, because a file cannot be waited for; a daemon, because a pipe may stay silent for ever.
            arguments = (asyncio.get_running_loop(), self._chunks)
            threading.Thread(target=_pump, args=arguments, name="standard input", daemon=True).start()
        return await self._chunks.get()


ChatInput = TerminalInput | PipeInput


def _pump(loop: asyncio.AbstractEventLoop, chunks: asyncio.Queue[bytes]) -> None:
    """Bytes of standard input into the queue, b"" at its end. Past `sys.stdin`, whose lock an exit would wait for."""
    while True:
        try:
            chunk = os.read(sys.__stdin__.fileno() if sys.__stdin__ else 0, _CHUNK_BYTES)
        except OSError:
            chunk = b""
        try:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)
        except RuntimeError:  # the loop is closed
            return
        if not chunk:
            return


class ChatCompleter(Completer):
    """Commands at the start of a line, parameters after `/set`, files after `/save` and `/load`."""

    def __init__(self, commands: Iterable[str], settings: Iterable[str]) -> None:
        self._commands = sorted(commands)
        self._settings = sorted(settings)
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        command, space, argument = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not space:
            yield from _starting_with(text, self._commands)
        elif command == "/set" and " " not in argument:
            yield from _starting_with(argument, self._settings)
        elif command in _FILE_COMMANDS:
            yield from self._files.get_completions(Document(argument), complete_event)


def _starting_with(start: str, words: list[str]) -> Iterator[Completion]:
    for word in words:
        if word.startswith(start):
            yield Completion(word, start_position=-len(start))


def _key_bindings(completer: ChatCompleter) -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add(Keys.Tab)
    def _(event: KeyPressEvent) -> None:
        # At once, because the next key may be waiting already; the editor's own completion comes later.
        buffer = event.current_buffer
        found = list(completer.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
        if common := get_common_complete_suffix(buffer.document, found):
            buffer.insert_text(common)
        elif buffer.complete_state:
            buffer.complete_next()
        else:
            buffer.start_completion()

    @bindings.add(Keys.Enter)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add(Keys.ControlC)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @bindings.add(Keys.Escape, Keys.Enter)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def open_history(path: Path | None) -> History:
    """What was typed before, in a file that its owner alone can read; in memory where there is none or can be none."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        print(f"eventlm: warning: no history is kept: {path}: {error.strerror}", file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(path)


@contextmanager
def no_echo() -> Iterator[None]:
    """What is typed meanwhile is not shown; the next prompt gets it."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
