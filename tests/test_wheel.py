"""The wheel, installed into an empty virtual environment and run from an empty folder, serves and replays.

The dependencies are those of the environment that runs the tests: after the wheel is installed without any, a .pth
file puts that environment's site-packages behind the new one's own. So nothing is downloaded; that eventlm itself
comes from the wheel is asserted. Lines of a .pth file are not searched for further .pth files, so an editable
install of eventlm over there stays invisible.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from eventlm.kernels.cpu.native import BUILDS
from tests.processes import PATIENCE_SECONDS
from tests.serving import Server, fake_text

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "eventlm", "kernels", "policies", "replay")
#: Enough to compile the four libraries, if they are older than their sources.
BUILD_SECONDS = 840
#: Nothing of the checkout is importable.
BARE = {"PYTHONPATH": ""}


def run(*command: str | Path, cwd: Path) -> str:
    return run_in(BARE, *command, cwd=cwd)


def run_in(environment: dict[str, str], *command: str | Path, cwd: Path, seconds: float = PATIENCE_SECONDS) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def copied_source(folder: Path) -> Path:
    """A build leaves its own folders in the source tree."""
    folder.mkdir(exist_ok=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SOURCES:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(path, folder / name)
    return folder


def build(kind: str, source: Path, compiler: str, **variables: str) -> tuple[Path, str]:
    """What was built, and what was said of it."""
    environment = BARE | {"CC": compiler, "CXX": compiler, "PATH": os.defpath} | variables
    said = run_in(
        environment,
        *(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", "dist"),
        cwd=source,
        seconds=BUILD_SECONDS,
    )
    [built] = (source / "dist").iterdir()
    return built, said


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the libraries that the checkout was installed with, by the same lists of sources and flags.

    setuptools compiles those anew that are older than their sources.
    """
    folder = tmp_path_factory.mktemp("build")
    libraries = folder / "lib" / "eventlm" / "kernels" / "cpu"
    libraries.mkdir(parents=True)
    for path in (REPOSITORY / "kernels" / "cpu").glob("*.so"):
        shutil.copy2(path, libraries)
    settings = folder / "settings.cfg"
    settings.write_text(f"[build]\nbuild_lib = {folder / 'lib'}\n")
    return build("wheel", copied_source(folder / "source"), "c++", DIST_EXTRA_CONFIG=str(settings))[0]


@pytest.fixture(scope="module")
def wheel_without_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """And what its build said."""
    return build("wheel", copied_source(tmp_path_factory.mktemp("uncompiled")), "/bin/false")


def libraries(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.endswith(".so")}


def test_it_holds_a_library_for_each_kind_of_processor(wheel: Path) -> None:
    assert libraries(wheel) == {f"eventlm/kernels/cpu/{name}.abi3.so" for name in BUILDS}


def test_without_a_compiler_it_is_built_all_the_same(wheel_without_compiler: tuple[Path, str], tmp_path: Path) -> None:
    built, said = wheel_without_compiler
    assert libraries(built) == set()
    for name in BUILDS:
        assert f'building extension "eventlm.kernels.cpu.{name}" failed' in said
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path)
    program = "from eventlm.models.cpu_kernels import choose_build; print(repr(choose_build('auto')))"
    environment = {"PYTHONPATH": str(tmp_path)}
    assert run_in(environment, sys.executable, "-c", program, cwd=tmp_path) == "''\n"


def test_the_source_distribution_can_be_compiled(tmp_path: Path) -> None:
    """It needs no compiler to be made."""
    built, _ = build("sdist", copied_source(tmp_path / "source"), "/bin/false")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"kernels/cpu/{path.name}" for path in (REPOSITORY / "kernels" / "cpu").iterdir()}
    assert {name for name in sources if name.endswith((".cpp", ".h"))} <= names
    assert {"eventlm/kernels/cpu/native.py", "eventlm/kernels/gpu/tuned.toml"} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_it_holds_the_packages_under_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"eventlm"}
    for expected in (
        "kernels/paged_attention.py",
        "policies/edf.py",
        "replay/verify/verifier.py",
        "core/core.py",
        "py.typed",
    ):
        assert f"eventlm/{expected}" in names
    models = {path.name for path in (REPOSITORY / "replay" / "cost" / "models").iterdir()}
    assert models == {name.rpartition("/")[2] for name in names if name.startswith("eventlm/replay/cost/models/")}
    for folder in (
        "eventlm/server/chat_page/static",
        "eventlm/server/dashboard/static",
        "eventlm/page/static",
        "eventlm/page/vendor",
    ):
        files = {f"{folder}/{path.name}" for path in (REPOSITORY / folder).iterdir()}
        assert files == {name for name in names if name.startswith(f"{folder}/")}
    kernels = {path.name for path in (REPOSITORY / "kernels" / "gpu").iterdir() if path.suffix in (".py", ".toml")}
    assert {f"eventlm/kernels/gpu/{name}" for name in kernels} == {
        name for name in names if name.startswith("eventlm/kernels/gpu/")
    }
    for licence in ("LICENSE", "eventlm/page/vendor/preact.LICENSE", "eventlm/page/vendor/uplot.LICENSE"):
        assert any(name.endswith(f".dist-info/licenses/{licence}") for name in names)


def test_it_serves_and_replays(wheel: Path, tmp_path: Path) -> None:
    environment, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    venv.create(environment, with_pip=False)
    python, eventlm = environment / "bin" / "python", environment / "bin" / "eventlm"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=empty)
    [site_packages] = environment.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for module in ("eventlm", "eventlm.kernels.kv_store", "eventlm.policies.edf", "eventlm.replay.verify.verifier"):
        found = run(python, "-c", f"import {module} as module; print(module.__file__)", cwd=empty)
        assert Path(found.strip()).is_relative_to(site_packages)

    server = Server(empty, "--model", "fake", environment=BARE, program=[str(eventlm)])
    try:
        server.wait_ready()
        assert server.request("GET", "/ui/main.js").status == 200
        assert server.complete(seed=4).json()["choices"][0]["text"] == fake_text(4, 8)
        assert server.stop() == 0
    finally:
        server.close()
    assert "decisions verified, tokens not checked" in run(eventlm, "replay", "runs/latest/trace.jsonl", cwd=empty)
