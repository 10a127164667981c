"""The prompt on a real terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pexpect
import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from eventlm.cli.debug.command import HISTORY_NAME
from eventlm.cli.debug.prompt import CommandCompleter
from tests.replay.golden import FOLDER

PATIENCE_SECONDS = 60


class Terminal:
    """A person's terminal with a session in it."""

    def __init__(self, *flags: str) -> None:
        # Nobody answers here where the cursor is.
        plain = {"TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "eventlm", "debug", str(FOLDER / "edf_tight.jsonl"), *flags],
            env=os.environ | plain,
            encoding="utf-8",
            timeout=PATIENCE_SECONDS,
            dimensions=(40, 200),
        )

    def see(self, text: str) -> None:
        self.process.expect_exact(text)

    def await_prompt(self) -> None:
        """Wait until it reads keys."""
        # With this a line editor begins that has taken the terminal over.
        self.see("\x1b[?2004h")

    def type(self, line: str) -> None:
        self.await_prompt()
        self.process.sendline(line)

    def leave(self) -> int:
        self.process.expect(pexpect.EOF)
        self.process.close()
        return int(self.process.exitstatus or 0)


def test_a_session_at_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal()
    terminal.see("14 sequences, 44 steps")
    terminal.see("`help` lists the commands")
    terminal.type("next 5")
    terminal.see("event 5 at ")
    # An empty line repeats a move.
    terminal.type("")
    terminal.see("event 10 at ")
    # Ctrl-C throws away what is typed.
    terminal.await_prompt()
    terminal.process.send("goto 5000")
    terminal.process.sendintr()
    terminal.type("find free <")
    terminal.see("expected a number")
    terminal.await_prompt()
    terminal.process.send("show runn\t")
    # It shows what it adds.
    terminal.see("ing")
    terminal.process.sendline("")
    terminal.see("at event 10 (")
    terminal.type("quit")
    assert terminal.leave() == 0
    history = tmp_path / "state" / HISTORY_NAME
    assert "find free <" in history.read_text()
    assert "goto 5000" not in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_the_end_of_input_leaves_and_no_history_is_kept_if_not_wanted(tmp_path: Path) -> None:
    terminal = Terminal("--no-history")
    terminal.await_prompt()
    terminal.process.sendeof()
    assert terminal.leave() == 0
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("text", "expected"), [("fin", ["find"]), ("find replica(0).ne", ["next_step"])])
def test_completions_replace_what_is_typed_of_them(text: str, expected: list[str]) -> None:
    found = list(CommandCompleter().get_completions(Document(text), CompleteEvent()))
    assert [each.text for each in found] == expected
    assert text[found[0].start_position :] in ("fin", "ne")
