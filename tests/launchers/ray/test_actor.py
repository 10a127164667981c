"""What an actor does, without Ray: it starts processes and tells of their output and end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from eventlm._version import __version__
from eventlm.launchers.ray.actor import RankActor, facts_here
from eventlm.launchers.ray.checkpoint import CheckpointName
from eventlm.launchers.ray.messages import PARENT, HostFacts, LookUp, News, StartRank, encode
from eventlm.models.config import model_fingerprint
from eventlm.system.shared_folder import NO_STEP, StepBoard
from tests.processes import is_running, wait_until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules to run are."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def command(folder: Path, code: str, *arguments: str, run: int = 1, **environment: str) -> bytes:
    """To run this code."""
    (folder / "program.py").write_text(code)
    return encode(
        StartRank(
            replica=0,
            rank=0,
            run=run,
            module="program",
            arguments=list(arguments),
            environment=environment,
            defaults={"PYTHONUNBUFFERED": "1", "SECRET": "default", "OTHER": "default"},
        )
    )


def to_the_end(actor: RankActor) -> tuple[bytes, list[int | None]]:
    """All output, and the exit codes in the order in which they were told."""
    output, codes = b"", []
    while True:
        news = msgspec.msgpack.decode(actor.watch(), type=News)
        output += news.output
        codes.append(news.exit_code)
        if news.is_over:
            return output, codes


def test_output_and_end_of_a_process(folder: Path) -> None:
    actor = RankActor()
    code = "import os, sys\nprint(sys.argv[1:], os.environ['SECRET'], os.environ['OTHER'], flush=True)\nsys.exit('why')"
    actor.start(command(folder, code, "a", PARENT, SECRET="of the run"))
    output, codes = to_the_end(actor)
    assert output.decode() == f"['a', '{os.getpid()}'] of the run default\nwhy\n"
    assert codes[-1] == 1


def test_the_end_is_told_although_a_child_holds_the_pipe(folder: Path) -> None:
    actor = RankActor()
    code = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\nsys.exit(3)"
    actor.start(command(folder, code))
    sleeper, ended = 0, False
    while not (ended and sleeper):
        news = msgspec.msgpack.decode(actor.watch(), type=News)
        assert not news.is_over
        sleeper = sleeper or int(news.output or 0)
        ended = ended or news.exit_code == 3
    os.kill(sleeper, 9)
    assert to_the_end(actor)[1][-1] == 3


def test_a_kill_is_for_one_run(folder: Path) -> None:
    actor = RankActor()
    actor.start(command(folder, "import time\ntime.sleep(600)", run=4))
    actor.kill(3)
    actor.kill(4)
    actor.kill(4)
    assert to_the_end(actor)[1][-1] == -9


def test_a_start_ends_the_one_before(folder: Path) -> None:
    actor = RankActor()
    first = actor.start(command(folder, "import time\ntime.sleep(600)"))
    actor.start(command(folder, "print('second')", run=2))
    wait_until(lambda: not is_running(first))
    assert to_the_end(actor)[0] == b"second\n"


def test_a_process_that_is_stopped_ends_with_its_actor(folder: Path) -> None:
    """It cannot see itself that its parent has gone."""
    code = "import os, signal\nprint(os.getpid(), flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"
    script = (
        "import sys\nfrom eventlm.launchers.ray.actor import RankActor\n"
        "actor = RankActor()\nprint(actor.start(bytes.fromhex(sys.argv[1])), flush=True)\n"
        "while True: actor.watch()"
    )
    argument = command(folder, code).hex()
    with subprocess.Popen([sys.executable, "-c", script, argument], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_until(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        parent.kill()
    wait_until(lambda: not is_running(child))


def test_what_a_host_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    name = CheckpointName("", str(tmp_path))
    facts = msgspec.msgpack.decode(RankActor().describe(encode(LookUp())), type=HostFacts)
    assert (facts.host, facts.version, facts.problem) == (socket.gethostname(), __version__, "")
    assert (facts.model, facts.fingerprint, facts.tokenizer) == ("", "", "")
    assert 0 < facts.port < 65536
    assert facts_here(LookUp(tokenizer=name)).tokenizer == str(tmp_path)
    none = facts_here(LookUp(model=CheckpointName("", "/none")))
    assert (none.problem, none.fingerprint) == ("there is no /none; copy it to that path on that host", "")


def test_a_fingerprint_is_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eventlm.models.fetch.gguf_folder import gguf_folder
    from tests.models.tiny_gguf import write_gguf

    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    found = facts_here(LookUp(model=CheckpointName("", str(file))))
    assert (found.problem, found.model) == ("", str(gguf_folder(file)))
    assert found.fingerprint == model_fingerprint(found.model)


def test_ranks_of_one_host_get_a_folder_for_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.system.shared_folder._MEMORY", tmp_path)
    at_end: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", at_end.append)
    actor = RankActor()
    assert msgspec.msgpack.decode(actor.describe(encode(LookUp())), type=HostFacts).shared == ""
    first, second = (
        Path(msgspec.msgpack.decode(actor.describe(encode(LookUp(num_sharing=2))), type=HostFacts).shared)
        for _ in range(2)
    )
    assert (first.exists(), list(tmp_path.iterdir())) == (False, [second])
    assert StepBoard(second).read(1) == NO_STEP
    [remove] = at_end
    remove()
    assert list(tmp_path.iterdir()) == []
