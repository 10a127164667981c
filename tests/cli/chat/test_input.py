"""The line editor: keys, completion and history, without a terminal."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput as Keyboard
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from eventlm.cli.chat.input import ChatCompleter, TerminalInput, open_history

COMMANDS = ("/set", "/save", "/system", "/history")
SETTINGS = ("temperature", "top_p", "top_k")


@pytest.fixture
def keyboard() -> Iterator[Keyboard]:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("Hello\r", "Hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("a \\ inside\r", "a \\ inside"),
        ("\x1b[200~one\ntwo\n\x1b[201~three\r", "one\ntwo\nthree"),
        ("/h\t\r", "/history"),
        ("/set te\t 0\r", "/set temperature 0"),
        ("/set to\tk\r", "/set top_k"),
        ("no\tcompletion\r", "nocompletion"),
        ("emptied\x03kept\r", "kept"),
        ("\x04", None),
    ],
)
async def test_keys(keyboard: Keyboard, keys: str, line: str | None) -> None:
    keyboard.send_text(keys)
    assert await TerminalInput(COMMANDS, SETTINGS, InMemoryHistory()).read() == line


async def test_ctrl_c_on_an_empty_line(keyboard: Keyboard) -> None:
    keyboard.send_text("\x03")
    with pytest.raises(KeyboardInterrupt):
        await TerminalInput(COMMANDS, SETTINGS, InMemoryHistory()).read()


async def test_the_history_is_for_its_owner_alone_and_comes_back(keyboard: Keyboard, tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    path.parent.mkdir()
    path.touch(0o644)
    keyboard.send_text("first\r")
    assert await TerminalInput(COMMANDS, SETTINGS, open_history(path)).read() == "first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keyboard.send_text("\x1b[A!\r")
    assert await TerminalInput(COMMANDS, SETTINGS, open_history(path)).read() == "first!"


def test_where_no_history_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert isinstance(open_history(tmp_path / "file" / "history"), InMemoryHistory)
    assert "eventlm: warning: no history is kept: " in capsys.readouterr().err


def test_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "chat.json").touch()
    found = ChatCompleter(COMMANDS, SETTINGS).get_completions(Document(f"/save {tmp_path}/ch"), CompleteEvent())
    assert [completion.text for completion in found] == ["at.json"]
