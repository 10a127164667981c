"""What a value of --cpu-kernels means."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eventlm.errors import UsageError
from eventlm.kernels.cpu import native
from eventlm.models.cpu_kernels import choose_build


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_builds", lambda: ["avx2", "baseline"])
    assert choose_build("auto") == "avx2"
    assert choose_build("baseline") == "baseline"
    assert choose_build("torch") == ""
    monkeypatch.setattr(native, "available_builds", list)
    assert choose_build("auto") == choose_build("torch") == ""


def test_what_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "processor_flags", lambda: native.BUILDS["avx2"])
    with pytest.raises(UsageError, match=r"--cpu-kernels amx: not on this machine, its processor lacks"):
        choose_build("amx")


def test_what_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", lambda build: None)
    with pytest.raises(UsageError) as caught:
        choose_build("baseline")
    assert str(caught.value) == (
        "--cpu-kernels baseline: not on this machine, they are not compiled, or of another version; install eventlm "
        "again, where there is a C++ compiler; available: auto, torch"
    )


def test_nothing_heavy_is_imported() -> None:
    """The control plane asks."""
    program = "import sys, eventlm.models.cpu_kernels; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
