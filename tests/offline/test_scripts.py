"""`LLM` in programs of their own, as people write them: it works there, and nothing is left of it however they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventlm.events import End, Finished
from tests.processes import PATIENCE_SECONDS, is_running, wait_until
from tests.serving import fake_text, verified

#: Steps slow enough to be caught in the middle of a call.
HEAD = """\
from eventlm import LLM, SamplingParams
llm = LLM("fake", record="runs", fake={"base_ns": 2_000_000})
params = SamplingParams(max_tokens=12, seed=5)
def pids(llm): print(*llm._composition.engine.worker_pids, flush=True)
pids(llm)
"""
#: A call that does not end by itself, with a sign that it is under way.
LONG_CALL = """\
import tqdm
class Bar(tqdm.tqdm):
    def update(self, n=1): print("working", flush=True)
long = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=8000)]
def work(): return llm.generate(["a", "b"], long, use_tqdm=Bar)
"""


#: A worker that begins once its engine has gone, so that no start ends before the signal comes.
HELD_WORKER = """\
import os, sys, time
if "eventlm.worker.process" in sys.orig_argv:
    while os.getppid() == int(sys.orig_argv[-1]):
        time.sleep(0.01)
"""


class Script:
    """A program that runs in a folder of its own; its first line of output has the process ids of its workers."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        path = folder / "script.py"
        path.write_text(textwrap.dedent(text))
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(folder / "tmp")},
        )
        self.pids: list[int] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def read_pids(self) -> None:
        self.pids += map(int, self.line().split())

    def end(self) -> tuple[int, str, str]:
        """Its exit code and the rest of its output, when it has ended and so have its workers."""
        out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        assert self.pids
        wait_until(lambda: not any(map(is_running, self.pids)))
        wait_until(lambda: not list((self.folder / "tmp").iterdir()))
        return self.process.returncode, out, err

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def check_record(self, *, clean_end: bool = True) -> None:
        trace = verified(self.folder / "runs" / "latest" / "trace.jsonl")
        assert trace.result.clean_end == clean_end
        assert isinstance(trace.events[-1], End) == clean_end


StartScript = Callable[..., Script]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartScript]:
    scripts: list[Script] = []

    def start(*parts: str) -> Script:
        scripts.append(Script(tmp_path, "".join(parts)))
        scripts[-1].read_pids()
        return scripts[-1]

    yield start
    for script in scripts:
        script.close()


def test_a_plain_script_without_a_main_guard(start: StartScript) -> None:
    script = start(HEAD, 'print(llm.generate("Hi", params)[0].outputs[0].text)\n')
    code, out, err = script.end()
    assert (code, out) == (0, fake_text(5, 12) + "\n")
    assert "Processed prompts: 100%" in err
    assert "Traceback" not in err
    script.check_record()


def test_within_running_loops_of_a_program_that_chose_its_own(start: StartScript) -> None:
    call = """
    import asyncio, uvloop
    async def main():
        return llm.generate("Hi", params, use_tqdm=False)[0].outputs[0].text
    async def in_a_thread():
        return (await asyncio.to_thread(llm.generate, "Hi", params, use_tqdm=False))[0].outputs[0].text
    print(asyncio.run(main()), uvloop.run(main()), asyncio.run(in_a_thread()), sep="\\n")
    """
    script = start("import uvloop; uvloop.install()\n", HEAD, textwrap.dedent(call))
    assert script.end() == (0, (fake_text(5, 12) + "\n") * 3, "")
    script.check_record()


def test_a_defect_is_logged_and_reported_without_its_message(start: StartScript) -> None:
    call = """
    from eventlm.engine.live_requests import LiveRequests
    def broken(self, emitted):
        local = "canary"
        raise KeyError(local)
    LiveRequests.emit = broken
    try:
        llm.generate("canary", params, use_tqdm=False)
    except Exception as error:
        print(error)
    """
    code, out, err = start(HEAD, textwrap.dedent(call)).end()
    assert (code, out) == (0, "the engine has died: a defect in it, KeyError\n")
    assert "in broken\n" in err
    assert err.rstrip().endswith("KeyError")
    # But for the line of the program itself.
    assert "canary" not in err.replace('llm.generate("canary"', "")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("llm.itself = llm; raise ValueError('a mistake')", 1),
        ("import threading; threading.Thread(target=llm.generate, args=('Hi', params)).start()", 0),
    ],
)
def test_ends_that_close_the_record(start: StartScript, end: str, code: int) -> None:
    script = start(HEAD, end, "\n")
    assert script.end()[0] == code
    script.check_record()


def test_a_deleted_one_is_gone_at_once(start: StartScript) -> None:
    call = """
    import gc, os
    [pid] = llm._composition.engine.worker_pids
    llm.itself = llm
    llm.generate("Hi", params, use_tqdm=False)
    del llm
    gc.collect()
    print(os.path.exists(f"/proc/{pid}"))
    """
    script = start(HEAD, textwrap.dedent(call))
    assert script.end() == (0, "False\n", "")


def test_two_at_once(start: StartScript) -> None:
    call = """
    other = LLM("fake", fake={"base_ns": 1_000_000})
    pids(other)
    print(other.generate("Hi", params, use_tqdm=False)[0].outputs[0].text)
    print(llm.generate("Hi", params, use_tqdm=False)[0].outputs[0].text)
    other.shutdown()
    print(llm.generate("Hi", params, use_tqdm=False)[0].outputs[0].text)
    """
    script = start(HEAD, textwrap.dedent(call))
    script.read_pids()
    assert len(script.pids) == 2
    assert script.end() == (0, (fake_text(5, 12) + "\n") * 3, "")
    script.check_record()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_during_a_call(start: StartScript, number: signal.Signals) -> None:
    script = start(HEAD, LONG_CALL, "work()\n")
    assert script.line() == "working"
    script.process.send_signal(number)
    assert script.end()[0] == -number
    script.check_record(clean_end=False)


def test_ctrl_c_ends_the_call_and_no_more(start: StartScript) -> None:
    call = """
    try:
        work()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(llm.generate("Hi", params, use_tqdm=False)[0].outputs[0].text, flush=True)
    work()
    """
    script = start(HEAD, LONG_CALL, textwrap.dedent(call))
    assert script.line() == "working"
    script.process.send_signal(signal.SIGINT)
    assert [script.line() for _ in range(3)] == ["interrupted", fake_text(5, 12), "working"]
    script.process.send_signal(signal.SIGINT)
    code, out, err = script.end()
    assert (code, out) == (-signal.SIGINT, "")
    assert err.rstrip().endswith("KeyboardInterrupt")
    script.check_record()
    trace = verified(script.folder / "runs" / "latest" / "trace.jsonl")
    assert sorted(event.reason for event in trace.of(Finished)) == ["cancelled"] * 2 + ["length"] * 3


def test_a_fork_has_no_engine_and_gets_an_error(start: StartScript) -> None:
    """Neither a fork that ends nor one that lives on does anything to the engine or its record."""
    call = """
    import gc, multiprocessing, os, sys, time, warnings
    # From Python 3.12 on, of any fork beside a thread.
    warnings.simplefilter("ignore", DeprecationWarning)
    def child():
        try:
            llm.generate("Hi", params, use_tqdm=False)
        except Exception as error:
            print(type(error).__name__, flush=True)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    if not os.fork():
        llm.shutdown()
        del llm
        gc.collect()
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    print(llm.generate("Hi", params, use_tqdm=False)[0].outputs[0].text, flush=True)
    reader, writer = os.pipe()
    if not os.fork():
        os.close(writer)
        os.read(reader, 1)  # until nobody can write any more
        os._exit(0)
    os.close(reader)
    llm.shutdown()
    from eventlm.bus.log_reader import LogReader
    with LogReader(llm.run_folder / "trace.jsonl") as lines:
        list(lines)
        print(lines.still_being_written)
    os.close(writer)
    os.wait()
    """
    script = start(HEAD, textwrap.dedent(call))
    assert script.end() == (0, f"EngineUnavailableError\n0\n{fake_text(5, 12)}\nFalse\n", "")
    script.check_record()


def test_children_of_multiprocessing(start: StartScript) -> None:
    """A record is closed at the end of such a process too, which runs no `atexit`, and whose parent has an LLM."""
    call = """
    import multiprocessing
    def child():
        global own
        own = LLM("fake", record="children")
        print(own.generate("Hi", params, use_tqdm=False)[0].outputs[0].text, flush=True)
        pids(own)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    """
    script = start(HEAD, textwrap.dedent(call))
    assert script.line() == fake_text(5, 12)
    script.read_pids()
    assert script.end() == (0, "", "")
    assert verified(script.folder / "children" / "latest" / "trace.jsonl").result.clean_end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_while_it_starts(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HELD_WORKER)
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-c", 'from eventlm import LLM; LLM("fake")'],
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            [worker] = wait_until(lambda: _children(process.pid))
            process.send_signal(number)
            assert process.wait(PATIENCE_SECONDS) == -number
        finally:
            # Or this test would wait for one that goes on, and not fail.
            process.kill()
    wait_until(lambda: not is_running(worker))
    wait_until(lambda: not list((tmp_path / "tmp").iterdir()))


def _children(pid: int) -> list[int]:
    """Of every thread of the process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, task.read_text().split())
    return found


def test_importing_is_cheap() -> None:
    program = """\
import sys, eventlm
print([name for name in sys.modules if name.split(".")[0] in ("msgspec", "torch", "zmq")], "LLM" in dir(eventlm))
from eventlm import *
print(LLM.__name__, SamplingParams().n, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[] True\nLLM 1 False\n"
