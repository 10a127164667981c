"""What a chat shows to a person, and to a script."""

from __future__ import annotations

import pytest

from eventlm.cli.chat.screen import Screen


def test_what_a_model_says_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\x1b]0;title\x07\x9b2J\tb\n"
    Screen(interactive=True).text(text)
    assert capsys.readouterr().out == "a�]0;title��2J\tb\n"
    Screen(interactive=False).text(text)
    assert capsys.readouterr().out == text


def test_notes_are_for_persons_and_begin_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for interactive, shown in ((True, "half\n\x1b[2ma note\x1b[0m\nwhole\n"), (False, "half\nwhole\n")):
        screen = Screen(interactive=interactive)
        screen.text("half")
        screen.note("a note")
        screen.line("whole")
        assert capsys.readouterr().out == shown
    monkeypatch.setenv("NO_COLOR", "1")
    Screen(interactive=True).note("plain")
    assert capsys.readouterr().out == "plain\n"


def test_a_terminal_gets_whole_words_in_the_style_of_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "12")
    for interactive, shown in (
        (True, "\x1b[2mlet me\x1b[0m\x1b[2m see\x1b[0m\nThe capital\nof France\n"),
        (False, "The capital of France\n"),
    ):
        screen = Screen(interactive=interactive)
        for piece in ("let", " me see"):
            screen.thought(piece)
        screen.thought("")
        screen.text("" if not interactive else "\n")
        for piece in ("The cap", "ital of", " Fra", "nce"):
            screen.text(piece)
        screen.end_line()
        assert capsys.readouterr().out == shown


def test_an_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(interactive=False).error("one\ntwo")
    assert capsys.readouterr() == ("", "eventlm: error: one two\n")
