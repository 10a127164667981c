"""Which GPUs are found, and what is said where there are none."""

from __future__ import annotations

import sys

import pytest

from eventlm.bootstrap.gpus import Gpu, find_gpus
from tests.bootstrap.fake_nvml import GIB, H100, gpu, install


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, gpu(), gpu("NVIDIA A10", 24 * GIB, 20 * GIB, (8, 6)))
    found = find_gpus()
    assert found.gpus == [
        Gpu(0, H100, 80 * GIB, 79 * GIB, (9, 0)),
        Gpu(1, "NVIDIA A10", 24 * GIB, 20 * GIB, (8, 6)),
    ]
    assert (found.driver, found.problem) == ("570.1", "")
    assert [each.device.name for each in found.gpus] == ["cuda:0", "cuda:1"]
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0", ["a"]),
        ("2,0", ["c", "a"]),
        (" 1 , 2 ", ["b", "c"]),
        ("GPU-1abc-1", ["b"]),
        ("GPU-2a,GPU-0", ["c", "a"]),
        # As CUDA does, all up to the first that names no GPU.
        ("1,7,0", ["b"]),
        ("0,-1,1", ["a"]),
        ("GPU-9,0", []),
        ("MIG-abc", ["c"]),
        ("0,MIG-abd,1", ["a"]),
        # Neither one that is named twice, nor a start that several have.
        ("1,1", ["b"]),
        ("GPU-", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_those_that_cuda_would_see_are_counted_as_it_does(
    visible: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, gpu("a"), gpu("b"), gpu("c"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = find_gpus()
    assert [(each.number, each.name) for each in found.gpus] == list(enumerate(names))
    assert found.problem == ("" if names else f"CUDA_VISIBLE_DEVICES={visible} leaves none of the GPUs here")


def test_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert find_gpus().problem == "the NVIDIA driver 570.1 has no GPU"
    install(monkeypatch, gpu(), no_driver="NVML Shared Library Not Found")
    assert "no NVIDIA driver that answers (NVML Shared Library Not Found); install it" in find_gpus().problem
    nvml = install(monkeypatch, gpu(), error="Unknown Error")
    assert "the NVIDIA driver does not answer (Unknown Error); see what `nvidia-smi`" in find_gpus().problem
    assert not nvml.is_open
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = find_gpus()
    assert found.gpus == []
    assert "the package nvidia-ml-py, which finds GPUs, is not installed" in found.problem
