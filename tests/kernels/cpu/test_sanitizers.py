"""The tests of the compiled forward pass with builds that watch each access to memory and all that C++ does not define.

Tile instructions are not watched; the tests beside this one say whether what they give is right.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from eventlm.kernels.cpu.native import available_builds

ROOT = Path(__file__).parents[3]
SANITIZERS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
SETTINGS = {
    # Python keeps what it has to its end.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}
#: Reads a vector of 64 bytes out of one of 32.
CANARY = """
import sys, torch
from pathlib import Path
from eventlm.models.loader import load_cpu_decoder
from tests.kernels.cpu.decoders import Shape, write_checkpoint
folder = write_checkpoint(Path(sys.argv[1]), Shape(hidden=16))
decoder = load_cpu_decoder(folder, "baseline", max_positions=64, num_threads=1)
decoder.norm(torch.zeros(1, 8))
"""


def runtimes() -> list[str]:
    """The sanitizers' libraries, which must be there before Python is."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = ["g++", f"-print-file-name={name}"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return found


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in `folder`, with the builds that are there."""
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(folder), "LD_PRELOAD": " ".join(runtimes())}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with builds of its own."""
    if shutil.which("g++") is None or not all(Path(path).is_absolute() for path in runtimes()):
        pytest.skip("no compiler with sanitizers")
    folder = tmp_path_factory.mktemp("watched")
    for name in ("eventlm", "kernels", "policies", "replay", "tests"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    builds = {module["name"].rpartition(".")[2]: module for module in project["tool"]["setuptools"]["ext-modules"]}
    for name in available_builds():
        flags = [*builds[name]["extra-compile-args"], *SANITIZERS]
        target = folder / "kernels/cpu" / f"{name}.abi3.so"
        subprocess.run(
            ["g++", "-shared", "-fPIC", *flags, *builds[name]["sources"], "-o", target], cwd=folder, check=True
        )
    return folder


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_nothing_is_read_or_written_that_is_not_there_and_nothing_is_undefined(folder: Path) -> None:
    names = (
        "decoder",
        "decoder_peers",
        "experts",
        "int8",
        "kv_formats",
        "packed",
        "paged_attention",
        "products",
        "programs",
        "sampling",
    )
    tests = [f"tests/kernels/cpu/test_{name}.py" for name in names]
    done = run(folder, "-m", "pytest", "-q", "-s", "-x", "-o", "timeout=1500", *tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "runtime error" not in done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_they_watch(folder: Path, tmp_path: Path) -> None:
    done = run(folder, "-c", CANARY, str(tmp_path))
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr
