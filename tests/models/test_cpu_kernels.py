"""What a value of --cpu-kernels means."""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec import structs

from eventlm.errors import UsageError
from eventlm.kernels.cpu import native
from eventlm.models.cpu_kernels import ForwardChoice, choose_build, choose_forward
from eventlm.models.spec import ExpertsSpec, FeedForwardSpec
from tests.models.test_decoder import LAYER, MODEL


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


def test_experts_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_builds", lambda: ["avx2", "baseline"])
    experts = ExpertsSpec(num_experts=4, num_active=2, expert=FeedForwardSpec(size=9))
    model = structs.replace(MODEL, layers=(LAYER, structs.replace(LAYER, feed_forward=experts)))
    reason = "mixtures of experts are not compiled yet"
    assert choose_forward("auto", model, model="m", dtype="bfloat16", block_size=16) == ForwardChoice("", reason)
    with pytest.raises(UsageError, match=f"--cpu-kernels avx2 cannot run m: {reason}; use auto or torch"):
        choose_forward("avx2", model, model="m", dtype="bfloat16", block_size=16)


def test_nothing_heavy_is_imported() -> None:
    """The control plane asks."""
    program = "import sys, eventlm.models.cpu_kernels; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
