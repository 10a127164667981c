"""`eventlm debug`: commands as arguments, from a pipe and as JSON; exit codes and messages."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from eventlm.cli.debug import command as command_module
from eventlm.cli.main import main
from eventlm.errors import ExitCode
from eventlm.events.codec import chain, close_line
from eventlm.events.markers import BEHAVIOUR_VERSION
from eventlm.replay.debugger.protocol import DebugResponse
from tests.replay.golden import FOLDER

TRACE = str(FOLDER / "edf_tight.jsonl")


def test_commands_as_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", TRACE, "-c", 'find event == "preempt"', "-c", "show queue"]) == ExitCode.OK
    output, errors = capsys.readouterr()
    assert "event 40 at 0.046574 s: preempt request=4 index=1" in output
    assert "the state is that after event 38" in output
    assert "1 sequence waiting at event 40 (0.046574 s), after the fact 38" in output
    assert errors == ""


def test_the_first_command_that_fails_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", TRACE, "-c", "find free <", "-c", "info"]) == ExitCode.USAGE
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "eventlm: error: column 7 of 'free <': expected a number, a text or a name, not the end",
        "  free <",
        "        ^",
    ]


def test_commands_from_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("# to the first launch\n\nnext launch\nquit\nnonsense\n"))
    assert main(["debug", TRACE]) == ExitCode.OK
    assert "launch replica=0" in capsys.readouterr().out


def test_json_for_each_argument(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["debug", TRACE, "--json", "-c", "next", "-c", "goto 999", "-c", "next"]) == ExitCode.USAGE
    lines = capfdbinary.readouterr().out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 2]
    assert json.loads(lines[1])["error"]["kind"] == "usage"


def start(*flags: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "eventlm", "debug", TRACE, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ask(process: subprocess.Popen[bytes], request: object) -> DebugResponse:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return msgspec.json.decode(process.stdout.readline(), type=DebugResponse, strict=True)


def test_a_program_talks_to_a_process() -> None:
    with start("--json") as process:
        first = ask(process, {"id": 1, "command": "goto request 92.2 preempt"})
        assert (first.id, first.position) == (1, 146)
        wrong = ask(process, {"id": "two", "command": "find fre < 5"})
        assert isinstance(wrong.error, msgspec.Struct)
        assert (wrong.id, wrong.position, wrong.error.column) == ("two", 146, 1)
        table = ask(process, {"id": 3, "command": "show running"})
        assert isinstance(table.result, dict)
        assert len(table.result["rows"]) == 2
        assert ask(process, ["no", "request"]).error is not msgspec.UNSET
        assert ask(process, {"command": "back"}).position == 145
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == ExitCode.OK
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_an_interrupt_ends_the_command_or_comes_too_late_for_it_but_never_ends_the_session() -> None:
    command = {"id": 1, "command": "find req(92).skips > 99"}
    with start("--json") as process:
        ask(process, command)
        begin = time.monotonic()
        ask(process, command)
        took = time.monotonic() - begin
        assert process.stdin is not None
        assert process.stdout is not None
        kinds = Counter[str]()
        for number in range(40):
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
            time.sleep(took * number / 30)
            process.send_signal(signal.SIGINT)
            response = msgspec.json.decode(process.stdout.readline(), type=DebugResponse)
            assert isinstance(response.error, msgspec.Struct)
            kinds[response.error.kind] += 1
        process.send_signal(signal.SIGINT)
        assert ask(process, {"command": "next"}).position == 1
        assert set(kinds) == {"interrupted", "usage"}
        process.stdin.close()
        assert process.wait(30) == ExitCode.OK
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_texts_of_a_trace_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path(TRACE).read_bytes().splitlines()
    last, path = "", tmp_path / "hostile.jsonl"
    with path.open("wb") as file:
        for line in lines:
            body = line[: line.rindex(b',"h":"')] if b',"h":"' in line else line[:-1]
            body = body.replace(b'"service_class":"gold"', b'"service_class":"\\u001b[2JEVIL"')
            last = chain(last, body)
            file.write(close_line(body, last))
    assert main(["debug", str(path), "--no-verify", "-c", "goto 2"]) == ExitCode.OK
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\\x1b[2JEVIL" in output


def test_ctrl_c_ends_the_command_and_not_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    from eventlm.replay.debugger.interrupt import InterruptedCommandError
    from eventlm.replay.debugger.session import Session

    with Session.open(TRACE) as session:
        session.execute("goto 100")
        with command_module._interruptible(session):
            check = session.interrupt.check

            def interrupted() -> None:
                signal.raise_signal(signal.SIGINT)
                check()

            monkeypatch.setattr(session.interrupt, "check", interrupted)
            with pytest.raises(InterruptedCommandError):
                session.execute("find req(92).skips > 99")
            monkeypatch.undo()
        assert session.position == 100
        # Work that looks at no flag ends when it is pressed again.
        with command_module._interruptible(session):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        session.execute("next")


def test_damage_and_what_precedes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path(TRACE).read_bytes().split(b"\n")
    lines[120] = lines[120].replace(b'"ts":', b'"ts": ')
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert main(["debug", str(path), "-c", "info"]) == ExitCode.DAMAGED
    [error] = capsys.readouterr().err.splitlines()
    assert "line 121" in error
    assert main(["debug", str(path), "--partial", "-c", "goto end", "-c", "show queue"]) == ExitCode.OK
    output, errors = capsys.readouterr()
    assert output.startswith("event 119 ")
    assert "what precedes is shown" in errors


def test_runs_that_cannot_be_debugged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = Path(TRACE).read_bytes().split(b"\n")[0]
    body = header[: header.rindex(b',"h":"')].replace(b'"behaviour":%d' % BEHAVIOUR_VERSION, b'"behaviour":0')
    old = tmp_path / "old.jsonl"
    old.write_bytes(close_line(body, chain("", body)))
    broken = str(FOLDER / "broken_block.jsonl")
    for path, code in [
        (str(old), ExitCode.VERSION),
        (str(tmp_path / "none"), ExitCode.USAGE),
        (broken, ExitCode.DIFFERENT),
    ]:
        assert main(["debug", path, "-c", "info"]) == code
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["debug", broken, "--no-verify", "-c", "next 5"]) == ExitCode.OK


def test_a_torn_trace_is_shown_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "torn.jsonl"
    content = Path(TRACE).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert main(["debug", str(path), "-c", "goto end"]) == ExitCode.OK
    assert "is torn" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["debug", "--help"])
    output = capsys.readouterr().out
    for part in ("examples:", "find free < 5 and running > 3", "exit codes:", "--partial"):
        assert part in output
