from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.native import BUILDS, available_builds, processor_flags

is_compiled = pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")


@is_compiled
def test_a_processor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "processor_flags", lambda: BUILDS["avx2"])
    assert available_builds() == ["avx2", "baseline"]
    monkeypatch.setattr(native, "processor_flags", frozenset)
    assert available_builds() == ["baseline"]


def test_what_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", lambda build: None)
    assert available_builds() == []
    with pytest.raises(LookupError):
        native.library("baseline")


def test_what_is_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "baseline.abi3.so").write_bytes(b"\x7fELF and then nothing")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert native._library.__wrapped__("baseline") is None
    assert native._library.__wrapped__("avx2") is None


def test_flags_are_words() -> None:
    flags = processor_flags()
    assert all(" " not in flag and ":" not in flag for flag in flags)
