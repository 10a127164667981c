from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.models.fetch.cache_folder import cache_folder


def test_variables_of_the_environment_say_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("EVENTLM_HOME", "~/models")
    assert cache_folder() == tmp_path / "models"
    monkeypatch.delenv("EVENTLM_HOME")
    assert cache_folder() == Path("/xdg/eventlm")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "eventlm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "eventlm"
