"""The wheel, installed into an empty virtual environment and run from an empty folder, serves and replays.

The dependencies are those of the environment that runs the tests: after the wheel is installed without any, a .pth
file puts that environment's site-packages behind the new one's own. So nothing is downloaded; that eventlm itself
comes from the wheel is asserted. Lines of a .pth file are not searched for further .pth files, so an editable
install of eventlm over there stays invisible.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.serving import PATIENCE_SECONDS, Server, fake_text

REPOSITORY = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "eventlm", "kernels", "policies", "replay")
#: Nothing of the checkout is importable.
BARE = {"PYTHONPATH": ""}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=BARE, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because a build leaves its own folders in the source tree."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=source)
    [built] = (source / "dist").glob("eventlm-*.whl")
    return built


def test_it_holds_the_packages_under_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"eventlm"}
    for expected in ("kernels/paged_attention.py", "policies/edf.py", "replay/verify.py", "core/core.py", "py.typed"):
        assert f"eventlm/{expected}" in names
    models = {path.name for path in (REPOSITORY / "replay" / "cost_models").iterdir()}
    assert models == {name.rpartition("/")[2] for name in names if name.startswith("eventlm/replay/cost_models/")}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_it_serves_and_replays(wheel: Path, tmp_path: Path) -> None:
    environment, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    venv.create(environment, with_pip=False)
    python, eventlm = environment / "bin" / "python", environment / "bin" / "eventlm"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=empty)
    [site_packages] = environment.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for module in ("eventlm", "eventlm.kernels.kv_store", "eventlm.policies.edf", "eventlm.replay.verify"):
        found = run(python, "-c", f"import {module} as module; print(module.__file__)", cwd=empty)
        assert Path(found.strip()).is_relative_to(site_packages)

    server = Server(empty, "--model", "fake", environment=BARE, program=[str(eventlm)])
    try:
        server.wait_ready()
        assert server.complete(seed=4).json()["choices"][0]["text"] == fake_text(4, 8)
        assert server.stop() == 0
    finally:
        server.close()
    assert "decisions verified, tokens not checked" in run(eventlm, "replay", "runs/latest/trace.jsonl", cwd=empty)
