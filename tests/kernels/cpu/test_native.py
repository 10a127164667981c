from __future__ import annotations

import ctypes
import inspect
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.decoder import CpuDecoder
from eventlm.kernels.cpu.native import BUILDS, available_builds, processor_flags
from eventlm.models.config import read_model
from eventlm.models.cpu_kernels import choose_forward, native_model
from eventlm.models.loader import load_cpu_decoder
from tests.kernels.cpu.decoders import Shape, write_checkpoint

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


@is_compiled
def test_what_other_sources_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without one of the functions is none; the same library with all of them is."""
    load = native._library.__wrapped__
    assert load("baseline") is not None

    class Older(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__("eventlm_of_another_version" if name == "eventlm_pin" else name)

    monkeypatch.setattr(ctypes, "CDLL", Older)
    assert load("baseline") is None


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.parametrize("added", [0, 1])
def test_what_sources_with_another_interface_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: int) -> None:
    """It has all the functions, which take other arguments than this file gives them."""
    names = re.findall(r"functions\.(eventlm_\w+)\.argtypes", inspect.getsource(native._declare))
    functions = "".join(f"long {name}(void) {{ return 0; }}\n" for name in ("eventlm_prepare", *names))
    source = tmp_path / "other.cpp"
    interface = f"int eventlm_interface(void) {{ return {native._INTERFACE + added}; }}"
    source.write_text(f'extern "C" {{\n{functions}{interface}\n}}\n')
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", tmp_path / "baseline.abi3.so"], check=True)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    monkeypatch.setattr(native, "processor_flags", frozenset)
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    assert available_builds() == ([] if added else ["baseline"])
    if added:
        config = read_model(write_checkpoint(tmp_path / "model", Shape()))
        chosen = choose_forward("auto", config, model="model", dtype="bfloat16", block_size=16)
        assert not chosen.build
        assert "of another version; install eventlm again" in chosen.reason


@is_compiled
def test_each_library_has_a_hash_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = [native.library_hash(build) for build in available_builds()]
    assert len(set(hashes)) == len(hashes)
    content = Path(native.__file__).with_name("baseline.abi3.so").read_bytes()
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    for last in (b"", b"1"):
        (tmp_path / "baseline.abi3.so").write_bytes(content + last)
        assert (native.library_hash("baseline") == hashes[-1]) == (last == b"")


def test_flags_are_words() -> None:
    flags = processor_flags()
    assert all(" " not in flag and ":" not in flag for flag in flags)


@is_compiled
@pytest.mark.parametrize("build", available_builds())
def test_missing_memory_is_an_error(tmp_path: Path, build: str) -> None:
    """A call that finds no memory says so, and leaves a decoder that works."""
    decoder = load_cpu_decoder(write_checkpoint(tmp_path, Shape()), build, max_positions=64, num_threads=2)
    hidden_SH = torch.ones(2, 64)
    before = decoder.logits(hidden_SH)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = 1 << 38 if soft == resource.RLIM_INFINITY else min(soft, 1 << 38)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        with pytest.raises(MemoryError):
            decoder._functions.eventlm_logits(decoder._handle, None, 2**31 - 1, None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert torch.equal(decoder.logits(hidden_SH), before)


@is_compiled
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (torch.Tensor.double, r"torch.float64 \[64, 8\]"),
        (lambda table: table[:, :7].contiguous(), r"torch.float32 \[64, 7\]"),
        (lambda table: table.T.contiguous().T, r"with strides \[1, 64\]"),
    ],
    ids=["dtype", "width", "layout"],
)
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_tables_that_are_not_as_instructions_have_them_are_an_error(
    tmp_path: Path, change: Callable[[Tensor], Tensor], found: str, kind: int, is_interleaved: bool
) -> None:
    model = native_model(read_model(write_checkpoint(tmp_path, Shape())))
    for each in model.instructions:
        each.is_interleaved = is_interleaved
        each.num_turned = 4 if is_interleaved else 8
    tables = [torch.zeros(64, 8), torch.zeros(64, 8)]
    CpuDecoder("baseline", model, [(tables[0], tables[1])], num_threads=1)
    tables[kind] = change(tables[kind])
    name = ("cosines", "sines")[kind]
    with pytest.raises(ValueError, match=rf"^{name} of rotary embedding 0: .*, 8\], are .*{found}"):
        CpuDecoder("baseline", model, [(tables[0], tables[1])], num_threads=1)


@is_compiled
def test_missing_memory_for_the_embedding_is_an_error(tmp_path: Path) -> None:
    """Packed weights find room, an embedding of the same size beside them does not."""
    config = read_model(write_checkpoint(tmp_path, Shape()))
    model = native_model(config)
    model.shape.vocab_size = 1 << 24  # 2 GiB
    angles = torch.zeros(64, 8)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + (3 << 30), hard))
    try:
        with pytest.raises(MemoryError):
            CpuDecoder("baseline", model, [(angles, angles)], num_threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
