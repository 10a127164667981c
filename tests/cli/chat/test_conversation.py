"""Chats in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventlm.cli.chat.conversation import Conversation, Message, SavedChat, load, save
from eventlm.errors import UsageError

CHAT = SavedChat(
    Conversation("Be brief.", [Message("user", "# Hi\n\n```\ncode\n```"), Message("assistant", "Здравствуйте 🙂")]),
    {"temperature": 0.5, "stop": ["a"]},
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "a.json", "m", CHAT)
    assert load(tmp_path / "a.json") == CHAT
    assert json.loads((tmp_path / "a.json").read_text())["messages"][0] == {"role": "system", "content": "Be brief."}


def test_undo_takes_whole_turns_back() -> None:
    chat = Conversation("s", [Message("user", "1"), Message("assistant", "2"), Message("user", "3")])
    assert [chat.undo(), chat.undo(), chat.undo()] == ["3", "1", None]
    assert chat.messages() == [{"role": "system", "content": "s"}]


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def test_a_list_of_messages_alone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([USER, ASSISTANT]))
    assert load(tmp_path / "a.json") == SavedChat(
        Conversation("", [Message("user", "a"), Message("assistant", "b")]), {}
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([USER], "the last message is the user's and has no answer"),
        ([ASSISTANT], "messages[0] is of the assistant, the user's is expected"),
        ([{"role": "system", "content": "s"}, USER, USER], "messages[2] is of the user, the assistant's is expected"),
        ([{"role": "tool", "content": "s"}], "messages: Invalid enum value 'tool'"),
        ({"model": "m"}, "holds no chat"),
        (7, "holds no chat"),
    ],
)
def test_what_is_no_chat(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value))
    with pytest.raises(UsageError) as caught:
        load(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    save(tmp_path / "a.md", "m", CHAT)
    with pytest.raises(UsageError, match=r"a\.md is not JSON \(.*\); Markdown is for reading only"):
        load(tmp_path / "a.md")
    with pytest.raises(UsageError, match=r"cannot read .*: No such file or directory"):
        load(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"cannot write .*: No such file or directory"):
        save(tmp_path / "none" / "a.json", "m", CHAT)
