from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.config.state_folder import STATE_VARIABLE, runs_folder, state_folder


@pytest.mark.parametrize(
    ("xdg", "expected"), [("/var/state", "/var/state/eventlm"), ("", "HOME"), ("relative/path", "HOME"), (None, "HOME")]
)
def test_state_is_kept_where_xdg_says(monkeypatch: pytest.MonkeyPatch, xdg: str | None, expected: str) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    if xdg is None:
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_STATE_HOME", xdg)
    monkeypatch.delenv(STATE_VARIABLE)
    found = Path("/home/somebody/.local/state/eventlm" if expected == "HOME" else expected)
    assert state_folder() == found
    assert runs_folder() == found / "runs"


def test_the_variable_moves_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    monkeypatch.setenv(STATE_VARIABLE, "/data")
    assert (state_folder(), runs_folder()) == (Path("/data"), Path("/data/runs"))
