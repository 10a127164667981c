"""`eventlm chat` as a process: fed by a pipe, and as a person at a terminal has it."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.cli.conftest import RunHere, StartServer
from tests.processes import PATIENCE_SECONDS, children, is_running, wait_until
from tests.serving import command, fake_text, run_command, verified

FAKE = ("--model", "fake", "--set", "seed=5", "--set", "max_tokens=9")
ANSWER = fake_text(5, 9)
#: An answer that does not end before it is stopped.
ENDLESS = ("--model", "fake", "--fake", "base_ns=20000000", "--set", "ignore_eos=true")
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")


def chat(*arguments: str, stdin: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command("chat", *arguments, cwd=cwd, stdin=stdin, **environment)


def test_each_line_of_a_pipe_is_a_turn(tmp_path: Path) -> None:
    lines = ["Hello", "/usr/bin is a folder", r"two \ ".strip(), "lines", "", "/set", "/history"]
    done = chat(*FAKE, "--system", "Be brief.", "--record", "runs", stdin="\n".join(lines), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = ["Hello", "/usr/bin is a folder", "two \nlines"]
    assert done.stdout == "".join(
        f"{ANSWER}\n" for _ in said
    ) + "seed = 5\nmax_tokens = 9\nsystem: Be brief.\n" + "".join(
        f"user: {text}\nassistant: {ANSWER}\n" for text in said
    )
    assert re.fullmatch(r"eventlm: recorded to runs/.*/trace.jsonl\n", done.stderr)
    assert verified(tmp_path / "runs" / "latest" / "trace.jsonl").result.clean_end


def test_a_failed_turn_is_reported_and_the_chat_continues(tmp_path: Path) -> None:
    lines = [
        "x" * 90,
        "/history",
        "/retry",
        "/set max_tokens 9",
        "short",
        "/undo",
        "/undo",
        "/sve x",
        "/set temperature 3",
        "/exit",
        "never said",
    ]
    done = chat("--model", "fake", "--max-model-len", "64", "--set", "seed=5", stdin="\n".join(lines), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == f"there is no message yet\n{ANSWER}\n"
    errors = done.stderr.splitlines()
    assert len(errors) == 5
    assert "maximum context length is 64 tokens" in errors[0]
    assert errors[0].removeprefix("eventlm: error: ") == errors[1].removeprefix("eventlm: error: ")
    assert errors[2] == "eventlm: error: there is nothing to take back"
    assert "unknown command /sve; did you mean /save?" in errors[3]
    assert "temperature: expected `float` <= 2.0" in errors[4]


def test_a_saved_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "b.json").touch()
    done = chat(*FAKE, stdin="Hello\n/save a.json\n/save a.md\n/save a.txt\n/save b.json\n", cwd=tmp_path)
    assert "a.txt: the name must end in .json or .md" in done.stderr
    assert "b.json exists and is not of this chat" in done.stderr
    body = json.loads((tmp_path / "a.json").read_text())
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    assert body == {"model": "fake", "seed": 5, "max_tokens": 9, "messages": messages}
    assert (tmp_path / "a.md").read_text() == f"# Chat with fake\n\n## user\n\nHello\n\n## assistant\n\n{ANSWER}\n"
    done = chat("--model", "fake", "--load", "a.json", stdin="More\n/save a.json\n", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n")
    assert len(json.loads((tmp_path / "a.json").read_text())["messages"]) == 4


def test_a_server_answers_like_an_engine_of_ones_own(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server("--model", "fake", environment={"EVENTLM_API_KEY": "canary"})
    settings = ("--set", "seed=5", "--set", "max_tokens=9")
    remote = chat("--url", server.url, *settings, stdin="Hello\nMore\n", cwd=tmp_path, OPENAI_API_KEY="canary")
    assert (remote.returncode, remote.stdout, remote.stderr) == (0, f"{ANSWER}\n" * 2, "")
    refused = chat("--url", server.url, *settings, stdin="Hello\n", cwd=tmp_path, EVENTLM_API_KEY="wrong")
    assert refused.returncode == 1
    assert "HTTP 401" in refused.stderr
    assert "Traceback" not in refused.stderr
    unknown = chat("--url", server.url, "--model", "other", stdin="Hello\n", cwd=tmp_path, EVENTLM_API_KEY="canary")
    assert unknown.returncode == 1
    assert "The model 'other' does not exist" in unknown.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:1", "--policy", "edf"], "--policy is for a model that runs here, but --url"),
        (["--url", "http://127.0.0.1:1"], "cannot connect to http://127.0.0.1:1/v1/models: Connection refused"),
        (["--api-key", "k"], "--api-key is for --url"),
        (["--model", "fake", "--set", "temperature"], "--set temperature: is not of the form NAME=VALUE"),
        (["--model", "fake", "--load", "none.json"], "cannot read none.json: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(run_here: RunHere, arguments: list[str], message: str) -> None:
    code, out, err = run_here("chat", *arguments)
    assert (code in (1, 2), out) == (True, "")
    assert message in err
    assert err.count("\n") == 1


def test_help_says_where_what_is_typed_is_kept(tmp_path: Path) -> None:
    done = chat("--help", stdin="", cwd=tmp_path)
    flag = done.stdout.partition("\n  --no-history")[2].partition("\n  --")[0]
    assert "chat_history in the state folder" in " ".join(flag.split())
    assert "~/.local/state/eventlm" in done.stdout


def test_a_parameter_that_the_model_cannot_take(tmp_path: Path) -> None:
    done = chat("--model", "fake", "--set", "stop_token_ids=[5000]", stdin="Hello\n", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Invalid value for 'stop_token_ids[0]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_input_that_is_not_utf8(tmp_path: Path) -> None:
    done = subprocess.run(
        command("chat", *FAKE), cwd=tmp_path, input=b"ab\xff\n", capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 2
    assert b"standard input is not valid UTF-8: invalid start byte" in done.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGKILL]
)
def test_nothing_is_left_of_it(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        command("chat", *ENDLESS), cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        [worker] = children(process.pid)
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: not is_running(worker))
        assert process.stderr.read() == b""


class Terminal:
    """A person's terminal with a chat in it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        # Nobody answers here where the cursor is.
        plain = {"TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
        environment = os.environ | plain | {"EVENTLM_STATE": str(folder / "state")}
        program, *rest = command("chat", *arguments)
        self.process: pexpect.spawn[str] = pexpect.spawn(
            program, rest, cwd=str(folder), env=environment, timeout=PATIENCE_SECONDS, encoding="utf-8"
        )
        self.process.setwinsize(40, 100)
        self.see("Ctrl-D leaves")

    def see(self, text: str) -> str:
        """Wait for a text; what was printed before it, without the terminal's escape sequences."""
        self.process.expect_exact(text)
        return _ESCAPE.sub("", self.process.before)

    def type(self, text: str) -> None:
        self.process.send(text)

    def await_prompt(self) -> None:
        """Wait until it reads keys: before that Ctrl-C is none of them but an interrupt, which ends the chat."""
        # With this a line editor begins that has taken the terminal over.
        self.process.expect_exact("\x1b[?2004h")

    def type_at_prompt(self, text: str) -> None:
        self.await_prompt()
        self.type(text)

    def leave(self) -> int:
        self.process.expect(pexpect.EOF)
        self.process.close()
        assert self.process.exitstatus is not None
        return int(self.process.exitstatus)


@pytest.fixture
def open_terminals() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.process.close(force=True)


def test_a_person_at_a_terminal(tmp_path: Path, open_terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, *FAKE)
    open_terminals.append(terminal)
    terminal.type_at_prompt("Hello\r")
    terminal.see(ANSWER)
    terminal.see(" tokens/s, first after ")
    terminal.see(" of 8,192")
    terminal.type_at_prompt("\x1b[200~pasted\nlines\x1b[201~ and\\\rmore\r")
    terminal.see(" of 8,192")
    terminal.type_at_prompt("/his\t\r")
    terminal.see("user: Hello")
    terminal.see("user: pasted\r\nlines and\r\nmore\r\n")
    terminal.type_at_prompt("half a line\x03")  # Ctrl-C empties the line
    terminal.type("/set temperature 0.5\r")
    terminal.see("temperature = 0.5")
    terminal.type_at_prompt("\x03")
    terminal.see("Ctrl-C again, or Ctrl-D, leaves")
    terminal.type_at_prompt("\x03")
    assert terminal.leave() == 0

    history = tmp_path / "state" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    assert "Hello" in history.read_text()

    again = Terminal(tmp_path, *FAKE, "--no-history")
    open_terminals.append(again)
    again.type_at_prompt("not kept\r")
    again.see(" of 8,192")
    again.type_at_prompt("\x04")
    assert again.leave() == 0
    assert "not kept" not in history.read_text()


def test_ctrl_c_stops_an_answer_and_keeps_what_came(tmp_path: Path, open_terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, *ENDLESS, "--set", "seed=5")
    open_terminals.append(terminal)
    terminal.type_at_prompt("Hello\r")
    terminal.see(fake_text(5, 12)[:10])
    terminal.type("\x03")
    terminal.type("typed ahead")
    terminal.see("· stopped")
    terminal.await_prompt()
    terminal.see("typed ahead")
    terminal.type("\x03/history\r")
    terminal.see("assistant: " + fake_text(5, 12)[:5])
    terminal.type_at_prompt("/undo\r")
    terminal.see("taken back: Hello")
    terminal.type_at_prompt("/quit\r")
    assert terminal.leave() == 0
