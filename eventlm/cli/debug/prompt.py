"""The prompt: a line editor with completion, and history that its owner alone can read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText

from eventlm.cli.chat.input import open_history
from eventlm.replay.debugger.completion import complete


class DebugPrompt:
    """history: the file; None: none is kept."""

    def __init__(self, history: Path | None) -> None:
        self._session: PromptSession[str] = PromptSession(
            completer=CommandCompleter(),
            complete_while_typing=False,
            history=open_history(history),
            enable_open_in_editor=False,
        )

    def read(self, position: int) -> str | None:
        """The next line; None at the end. Ctrl-C begins the line anew."""
        while True:
            try:
                return self._session.prompt(FormattedText([("ansiblue bold", f"{position:,}> ")]))
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None


class CommandCompleter(Completer):
    """Commands, places and the names of expressions."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        found = complete(document.text_before_cursor)
        for word in found.words:
            yield Completion(word, start_position=-found.num_chars)
