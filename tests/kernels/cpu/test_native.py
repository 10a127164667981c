from __future__ import annotations

import subprocess
import sys

import pytest

from eventlm.errors import UsageError
from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.native import BUILDS, available_builds, choose_build, processor_flags


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    here = available_builds()
    assert choose_build("auto") == here[0]
    assert [choose_build(build) for build in here] == here
    assert choose_build("torch") == ""
    monkeypatch.setattr(native, "available_builds", list)
    assert choose_build("auto") == choose_build("torch") == ""


def test_a_processor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "processor_flags", lambda: BUILDS["avx2"])
    assert available_builds() == ["avx2", "baseline"]
    with pytest.raises(UsageError, match=r"--cpu-kernels amx: not on this machine, its processor lacks"):
        choose_build("amx")
    monkeypatch.setattr(native, "processor_flags", frozenset)
    assert available_builds() == ["baseline"]


def test_what_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", lambda build: None)
    assert available_builds() == []
    with pytest.raises(UsageError) as caught:
        choose_build("baseline")
    assert str(caught.value) == (
        "--cpu-kernels baseline: not on this machine, they are not compiled; available: auto, torch"
    )
    with pytest.raises(LookupError):
        native.library("baseline")


def test_flags_are_words() -> None:
    flags = processor_flags()
    assert all(" " not in flag and ":" not in flag for flag in flags)


def test_nothing_heavy_is_imported() -> None:
    """The control plane looks builds up."""
    program = "import sys, eventlm.kernels.cpu.native; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
