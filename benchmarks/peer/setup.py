"""Sets up the servers that eventlm is measured beside, in a folder of their own in eventlm's cache.

A virtual environment holds OpenVINO GenAI and the converters of both peers; llama.cpp's server and its quantiser are
compiled from the source that llama-cpp-python's sdist carries. Every version is pinned. What is there already is used
again; a part that was broken off is made anew. Each step writes its output to a log beside what it makes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

LLAMA_CPP_PYTHON = "0.3.36"
TOOLS = ("cmake==4.4.4", "ninja==1.13.2")
OPENVINO = (
    "openvino-genai==2026.4.1.0",
    "openvino==2026.4.1",
    "openvino-tokenizers==2026.4.1.0",
    "optimum-intel==2.2.0",
    "nncf==3.4.0",
    "aiohttp==3.14.5",
)
#: What llama.cpp's converter imports, of the versions that optimum-intel takes too.
CONVERTER = ("torch==2.13.0", "transformers==5.5.4", "sentencepiece==0.2.1", "protobuf==7.36.2")
#: The server and its tools, for the processor at hand. Its web page would have to be downloaded.
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)


#: For the library of its products that no processor with more than AVX2, FMA and F16C uses more of.
AVX2_FLAG = "-DGGML_NATIVE=OFF"


class Mend(NamedTuple):
    """A line of llama.cpp that keeps its server from being measured."""

    file: str
    wrong: str
    right: str


MENDS = (
    # gcc 12's header says that 8 bytes of a tile configuration are read, so the compiler leaves the other 56 out: the
    # server crashes at its first int8 product on a processor with AMX.
    Mend(
        "ggml/src/ggml-cpu/amx/mmq.cpp",
        "_tile_loadconfig(&tc);",
        '__asm__ volatile("ldtilecfg %0" :: "m"(tc));',
    ),
    # False is httplib's word for a stream that broke off: the server would close each connection after its stream, and
    # now and then on a request that its client had just sent there.
    Mend("tools/server/server-http.cpp", "            return has_next;", "            return true;"),
)
INSTALL_SECONDS = 1800.0
BUILD_SECONDS = 7200.0
LOG_TAIL_LINES = 15


class SetupError(Exception):
    """A step failed; the message has the end of its log."""


class Peers(NamedTuple):
    """Where the peers are: a Python that has OpenVINO and the converters, llama.cpp's sources and programs."""

    folder: Path
    python: Path
    llama_source: Path
    llama_build: Path

    def llama_program(self, name: str) -> Path:
        """One of llama.cpp's programs."""
        return self.llama_build / "bin" / name

    @property
    def llama_avx2_libraries(self) -> Path:
        """The folder of llama.cpp's products as compiled for AVX2, to be found before those beside its programs."""
        return self.llama_build.with_name("build-avx2") / "bin"


def locate(folder: Path) -> Peers:
    """Where everything is, or will be."""
    llama = folder / f"llama.cpp-{LLAMA_CPP_PYTHON}"
    return Peers(
        folder=folder,
        python=folder / "venv" / "bin" / "python",
        llama_source=llama / "source" / "vendor" / "llama.cpp",
        llama_build=llama / "build",
    )


def set_up(server: str, peers: Peers, *, is_avx2: bool = False) -> None:
    """Make what is missing for a server, inside `only_one`; with `is_avx2` also what holds it to AVX2.

    Raises SetupError.
    """
    if server == "eventlm":
        return
    _make_venv(peers)
    if server == "llama.cpp":
        _unpack_llama_cpp(peers)
        _build_llama(peers, is_avx2=is_avx2)


@contextmanager
def only_one(peers: Peers) -> Iterator[None]:
    """Keeps other processes from setting up the same folder meanwhile."""
    peers.folder.mkdir(parents=True, exist_ok=True)
    with (peers.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_step(name: str, command: Sequence[str | Path], log: Path, *, timeout_s: float, **environment: str) -> None:
    """Run a command to its end with its output in `log`. Raises SetupError with the log's end."""
    print(f"{name} (log: {log})", file=sys.stderr, flush=True)
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                env=os.environ | environment,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise SetupError(f"{name}: not done after {timeout_s:.0f} s:\n{log_tail(log)}") from None
        except OSError as error:
            raise SetupError(f"{name}: {error}") from error
    if code:
        raise SetupError(f"{name}: exit code {code}:\n{log_tail(log)}")


def log_tail(log: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line}" for line in lines[-num_lines:])


def _make_venv(peers: Peers) -> None:
    wanted = (*TOOLS, *OPENVINO, *CONVERTER)
    stamp = peers.folder / "venv.installed"
    if stamp.exists() and stamp.read_text().split() == list(wanted):
        return
    venv = peers.folder / "venv"
    run_step(
        "make the peers' environment", [sys.executable, "-m", "venv", venv], venv.with_suffix(".log"), timeout_s=300
    )
    pip: list[str | Path] = [peers.python, "-m", "pip"]
    log = peers.folder / "install.log"
    run_step("install OpenVINO and the converters", [*pip, "install", *wanted], log, timeout_s=INSTALL_SECONDS)
    # optimum-intel asks for one; built for another torch than ours, it stops transformers from loading, and no language
    # model needs it.
    run_step("leave torchvision out", [*pip, "uninstall", "-y", "torchvision"], log, timeout_s=300)
    stamp.write_text("\n".join(wanted))


def _unpack_llama_cpp(peers: Peers) -> None:
    if peers.llama_source.exists():
        return
    parent = peers.folder / f"llama.cpp-{LLAMA_CPP_PYTHON}"
    partial = parent / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    package = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
    fetch: list[str | Path] = [
        peers.python,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
        "-d",
        partial,
        package,
    ]
    run_step(f"fetch the sdist of {package}", fetch, parent / "fetch.log", timeout_s=INSTALL_SECONDS)
    (sdist,) = partial.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(partial, filter="data")
    sdist.unlink()
    (unpacked,) = partial.iterdir()
    apply_mends(unpacked / "vendor" / "llama.cpp")
    unpacked.rename(parent / "source")
    partial.rmdir()


def apply_mends(llama_source: Path) -> None:
    """Raises SetupError for a line that is not there: with another version its mend may have another place, or none."""
    for mend in MENDS:
        source = llama_source / mend.file
        text = source.read_text()
        if mend.wrong not in text:
            raise SetupError(f"{source} has no line `{mend.wrong.strip()}` to mend")
        source.write_text(text.replace(mend.wrong, mend.right))


def _build_llama(peers: Peers, *, is_avx2: bool) -> None:
    if not (peers.llama_source / "tools" / "server").exists():
        raise SetupError(f"{peers.llama_source} has no tools/server: this sdist cannot build llama-server")
    programs = [peers.llama_program(name) for name in ("llama-server", "llama-quantize")]
    if not all(program.exists() for program in programs):
        _compile(peers, peers.llama_build, CMAKE_FLAGS, [program.name for program in programs])
    if is_avx2 and not any(peers.llama_avx2_libraries.glob("libggml-cpu.so*")):
        _compile(peers, peers.llama_avx2_libraries.parent, (*CMAKE_FLAGS, AVX2_FLAG), ["ggml-cpu"])


def _compile(peers: Peers, build: Path, flags: Sequence[str], targets: Sequence[str]) -> None:
    tools, log = peers.python.parent, build.with_suffix(".log")
    configure: list[str | Path] = [tools / "cmake", "-S", peers.llama_source, "-B", build, "-G", "Ninja", *flags]
    ninja = tools / "ninja"
    run_step("configure llama.cpp", [*configure, f"-DCMAKE_MAKE_PROGRAM={ninja}"], log, timeout_s=600)
    num_jobs = str(len(os.sched_getaffinity(0)))
    run_step(
        f"compile {', '.join(targets)} of llama.cpp, which takes a while",
        ["nice", "-n", "19", ninja, "-C", build, "-j", num_jobs, *targets],
        log,
        timeout_s=BUILD_SECONDS,
    )
