"""Launchers are found by name, and a wrong one is explained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.engine.plugins.launchers import resolve_launcher
from eventlm.errors import UsageError
from eventlm.launchers.process import ProcessLauncher

SOURCE = """
from eventlm.launchers.launcher import Launcher

class Elsewhere(Launcher, frozen=True, kw_only=True):
    address: str = "auto"

class NoLauncher:
    pass
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with launchers of the user's own and an installed one."""
    (tmp_path / "elsewhere.py").write_text(SOURCE)
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[eventlm.launchers]\nfar = elsewhere:Elsewhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def test_the_default_is_built_in() -> None:
    assert resolve_launcher({"type": "process"}) == ProcessLauncher()


@pytest.mark.parametrize("name", ["far", "elsewhere:Elsewhere"])
def test_others_bring_their_parameters(name: str) -> None:
    launcher = resolve_launcher(parse_plugin_spec(f"{name}:address=head"))
    assert (type(launcher).__name__, launcher.address) == ("Elsewhere", "head")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("proces", "unknown launcher 'proces'; did you mean process? Installed: process, ray, far"),
        ("process:address=x", "launcher process has no parameter 'address' (it takes none)"),
        (
            "elsewhere:NoLauncher",
            "is not a launcher: it must be a class derived from eventlm.launchers.launcher.Launcher",
        ),
        (
            "ray:timeout_s=-1",
            "launcher ray: timeout_s=-1: must be an integer of at least 1",
        ),
        (
            "ray:placement=heap",
            "launcher ray: placement=heap: must be one of pack, strict_pack, spread, strict_spread",
        ),
        ("ray:timeout=3", "launcher ray has no parameter 'timeout'; did you mean timeout_s? (it takes address, "),
        ("nowhere:Class", "no module 'nowhere'"),
    ],
)
def test_a_wrong_one_is_explained(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_launcher(parse_plugin_spec(text))
    assert message in str(caught.value)
