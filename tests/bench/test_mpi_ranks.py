"""Loads from ranks that a real mpiexec starts, on a server that a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy
import pytest
from aiohttp import web

from eventlm.bench.mpi_ranks import world
from eventlm.errors import UsageError
from tests.bench.byte_server import ByteServer
from tests.client.scripted import replying, scripted_server
from tests.processes import PATIENCE_SECONDS
from tests.serving import command

FLAGS = ("--no-ceiling", "--tokenizer", "fake", "--input-len", "uniform:min=20,max=60", "--output-len", "4", "--json")
_MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
needs_mpi = pytest.mark.skipif(
    _MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="there is no mpiexec or no mpi4py: pip install 'eventlm[mpi]'",
)


class Run(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        found: dict[str, Any] = json.loads(self.out)
        return found


async def mpiexec(*arguments: str, cwd: Path, during: Awaitable[int] | None = None) -> Run:
    """Run it to its end; `during` ends when it is to get the signal that comes out of it."""
    assert _MPIEXEC is not None
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        _MPIEXEC, *arguments, cwd=cwd, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            output = asyncio.ensure_future(process.communicate())
            if during is not None:
                process.send_signal(await during)
            out, err = await output
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode is not None
    return Run(process.returncode, out.decode(), err.decode())


def ranks_of(number: int, *flags: str) -> list[str]:
    """The part of a command line of mpiexec that starts so many ranks of a load."""
    return ["-n", str(number), *command("bench", "serve", "--mpi", *flags)]


class GateServer(ByteServer):
    """Answers no request until this many are under way."""

    def __init__(self, wanted: int) -> None:
        super().__init__("m")
        self.peak = self._inside = 0
        self._wanted = wanted
        self._full = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await super().handle(request)
        self._inside += 1
        self.peak = max(self.peak, self._inside)
        if self._inside == self._wanted:
            self._full.set()
        await self._full.wait()
        try:
            return await super().handle(request)
        finally:
            self._inside -= 1


class FlakyServer(ByteServer):
    """One attempt in ten gets a 429, and one a 500."""

    def __init__(self) -> None:
        super().__init__("m")
        self.replies: Counter[int] = Counter()
        self._attempts = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await super().handle(request)
        self._attempts += 1
        status = {3: 429, 8: 500}.get(self._attempts % 10, 200)
        self.replies[status] += 1
        if status != 200:
            return await replying(status, '{"error":{"message":"not now"}}')(request)
        return await super().handle(request)


class LostServer(ByteServer):
    """Answers 40 and then drops every connection."""

    def __init__(self) -> None:
        super().__init__("m")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if len(self.bodies) >= 40 and request.method == "POST":
            assert request.transport is not None
            request.transport.abort()
        return await super().handle(request)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


@pytest.fixture
def _no_memory_left() -> Iterator[None]:
    """MPICH leaves what ranks share where they end at once."""
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    yield
    for path in set(Path("/dev/shm").glob("mpich_shm_*")) - before:
        path.unlink(missing_ok=True)


@needs_mpi
async def test_three_ranks_do_what_one_does(tmp_path: Path) -> None:
    """The server sees all places taken, each request once; and the figures are those of all records."""
    bodies, summaries = [], []
    for ranks, inflight in ((1, 10), (3, 4)):
        server, folder = GateServer(ranks * inflight), tmp_path / str(ranks)
        async with scripted_server(server.handle) as url:
            flags = ("--url", url, "--inflight", str(inflight), "--num-prompts", "60", *FLAGS, "--output", str(folder))
            run = await mpiexec(*ranks_of(ranks, *flags), cwd=tmp_path)
        summary = run.summary
        assert server.peak == ranks * inflight
        assert summary["options"]["max_concurrency"] == ranks * inflight
        assert summary["statistics"]["peak_concurrency"] == ranks * inflight
        lines = lines_of(folder)
        assert sorted(line["index"] for line in lines) == list(range(60))
        assert {line["rank"] for line in lines} == set(range(ranks))
        for name in ("ttft_ms", "e2e_ms"):
            values = [line[name] for line in lines]
            found = summary["statistics"][name]
            assert found["mean"] == pytest.approx(numpy.mean(values))
            for percent in (50, 95, 99):
                assert found[f"p{percent}"] == pytest.approx(numpy.percentile(values, percent))
        bodies.append(sorted(json.dumps(body) for body in server.bodies))
        summaries.append(summary["statistics"])
    assert bodies[0] == bodies[1]
    one, three = summaries
    for name in ("num_requests", "num_success", "errors", "prompt_tokens", "output_tokens"):
        assert one[name] == three[name]
    assert (three["num_success"], three["output_tokens"]) == (60, 60)


@needs_mpi
async def test_failures_and_retries_of_all_ranks_add_up(tmp_path: Path) -> None:
    """Arrivals are dealt out in turn; some give up after their only retry."""
    server = FlakyServer()
    async with scripted_server(server.handle) as url:
        load = ("--request-rate", "300", "--num-prompts", "120", "--retries", "1", "--retry-backoff-ms", "5")
        flags = ("--url", url, *load, *FLAGS, "--output", "out", "--seed", "3")
        run = await mpiexec(*ranks_of(2, *flags), cwd=tmp_path)
    statistics = run.summary["statistics"]
    lines = lines_of(tmp_path / "out")
    assert all(line["rank"] == line["index"] % 2 for line in lines)
    assert statistics["num_requests"] == 120
    assert statistics["num_success"] == server.replies[200]
    failed = Counter(statistics["retries"]) + Counter(statistics["errors"])
    assert failed == {"http 429": server.replies[429], "http 500": server.replies[500]}
    assert server.replies.total() == 120 + sum(statistics["retries"].values())
    assert min(server.replies[429], server.replies[500]) >= 12
    assert Counter(line["error"] for line in lines if line["error"]) == statistics["errors"]
    # A rank counts from the time of a request's first attempt.
    assert all(line["e2e_ms"] >= 2.5 for line in lines if line["retried"] and line["e2e_ms"] is not None)


@needs_mpi
async def test_a_server_that_goes_away_ends_the_load(tmp_path: Path) -> None:
    """Three ranks count together: of 40 requests without an answer, none would reach 16 by itself."""
    async with scripted_server(LostServer().handle) as url:
        flags = ("--url", url, "--inflight", "2", "--num-prompts", "80", *FLAGS)
        run = await mpiexec(*ranks_of(3, *flags), cwd=tmp_path)
    assert run.code == 1
    assert "the server does not answer any more, the rest was not sent" in run.err
    summary = json.loads(run.out)
    assert summary["server_gone"]
    statistics = summary["statistics"]
    assert statistics["num_success"] == 40
    assert statistics["num_requests"] < 80


@needs_mpi
async def test_a_signal_ends_all_ranks_with_a_report(tmp_path: Path) -> None:
    server = GateServer(6)

    async def when_busy() -> int:
        while len(server.bodies) < 30:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return signal.SIGINT

    async with scripted_server(server.handle) as url:
        flags = ("--url", url, "--inflight", "3", "--duration", "600", *FLAGS)
        run = await mpiexec(*ranks_of(2, *flags), cwd=tmp_path, during=when_busy())
    assert run.code == 130, run.err
    # The launcher has something to say before.
    summary = json.loads(run.out.splitlines()[-1])
    assert summary["interrupted"]
    assert summary["statistics"]["num_success"] >= 24


@needs_mpi
@pytest.mark.usefixtures("_no_memory_left")
async def test_a_signal_before_the_load_ends_all_ranks_with_a_line(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def handler(_: web.BaseRequest) -> web.StreamResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def when_asked() -> int:
        await asked.wait()
        return signal.SIGINT

    async with scripted_server(handler) as url:
        run = await mpiexec(*ranks_of(2, "--url", url), cwd=tmp_path, during=when_asked())
    assert (run.code, run.err) == (130, "eventlm: interrupted before anything was sent\n")


@needs_mpi
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            [*ranks_of(2, "--seed", "1"), ":", *ranks_of(1, "--seed", "2")],
            2,
            "rank 2 has other flags than rank 0: seed",
        ),
        (ranks_of(2, "--url", "http://127.0.0.1:1"), 1, "is the server running?"),
    ],
    ids=["flags", "server"],
)
async def test_a_mistake_is_one_line(arguments: list[str], code: int, words: str, tmp_path: Path) -> None:
    run = await mpiexec(*arguments, cwd=tmp_path)
    assert (run.code, run.out) == (code, "")
    assert words in run.err
    assert run.err.startswith("eventlm: error: ")
    assert run.err.count("\n") == 1


@needs_mpi
@pytest.mark.usefixtures("_no_memory_left")
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ([], "2 ranks were started, each with a load of its own: add --mpi"),
        (["--mpi", "--bogus"], "unknown flag --bogus"),
        (["--mpi"], "--mpi needs the package mpi4py: pip install 'eventlm[mpi]'"),
    ],
    ids=["alone", "flag", "mpi4py"],
)
async def test_a_rank_that_fails_before_mpi_ends_the_others(mistake: list[str], words: str, tmp_path: Path) -> None:
    """They wait for it in MPI."""
    without = tmp_path / "without"
    without.mkdir()
    (without / "mpi4py.py").write_text("raise ImportError\n")
    path = f"{without}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    second = ["-n", "1", "env", f"PYTHONPATH={path}", *command("bench", "serve", *mistake)]
    run = await mpiexec(*ranks_of(1), ":", *second, cwd=tmp_path)
    assert (run.code, run.out) == (2, "")
    assert words in run.err
    assert run.err.startswith("eventlm: error: ")
    assert run.err.count("\n") == 1


@needs_mpi
async def test_an_error_of_one_rank_ends_the_others(tmp_path: Path) -> None:
    """Only rank 0 finds the data set."""
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    (tmp_path / "0" / "prompts.txt").write_text("one\n")
    async with scripted_server(ByteServer("m").handle) as url:
        program = " ".join(command("bench", "serve", "--mpi", "--url", url, "--dataset", "prompts.txt"))
        own_folder = f"cd ${{PMI_RANK:-$OMPI_COMM_WORLD_RANK}} && exec {program}"
        run = await mpiexec("-n", "2", "sh", "-c", own_folder, cwd=tmp_path)
    assert run == (2, "", "eventlm: error: rank 1: --dataset prompts.txt: No such file or directory\n")


@needs_mpi
@pytest.mark.usefixtures("_no_memory_left")
async def test_a_fault_of_one_rank_ends_the_others(tmp_path: Path) -> None:
    faulty = (
        "import sys, eventlm.bench.load as load, eventlm.cli.main as cli; "
        "load.Load.run = lambda *_: 1 / 0; sys.exit(cli.main(sys.argv[1:]))"
    )
    async with scripted_server(ByteServer("m").handle) as url:
        flags = ("--url", url, "--inflight", "1", "--num-prompts", "9", *FLAGS)
        other = ["-n", "1", sys.executable, "-c", faulty, "bench", "serve", "--mpi", *flags]
        run = await mpiexec(*ranks_of(1, *flags), ":", *other, cwd=tmp_path)
    assert run.code != 0
    assert "ZeroDivisionError" in run.err


@needs_mpi
async def test_without_a_launcher_there_is_one_rank(tmp_path: Path) -> None:
    server = ByteServer("m")
    async with scripted_server(server.handle) as url:
        process = await asyncio.create_subprocess_exec(
            *command("bench", "serve", "--mpi", "--url", url, "--inflight", "2", "--num-prompts", "5", *FLAGS),
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(PATIENCE_SECONDS):
            out, _ = await process.communicate()
    summary = json.loads(out)
    assert (summary["num_ranks"], summary["statistics"]["num_success"]) == (1, 5)


def test_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutLibrary(ModuleType):
        """As mpi4py is where it finds no library."""

        @property
        def MPI(self) -> None:
            raise RuntimeError("cannot load MPI library")

    for module, words in ((None, "needs the package mpi4py"), (WithoutLibrary("mpi4py"), "finds no MPI library")):
        monkeypatch.setitem(sys.modules, "mpi4py", module)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=rf"--mpi.* {words}: pip install 'eventlm\[mpi\]'"):
            world()
