"""The program as a whole: exit codes, messages, and what it loads to say them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from eventlm import __version__
from eventlm.cli import main as program
from eventlm.cli.main import COMMANDS, main
from eventlm.engine.plugins.registry import BUILT_IN

HEAVY = ("torch", "transformers", "aiohttp", "numpy", "zmq")


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("eventlm: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("eventlm: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sreve"], "unknown command 'sreve'; did you mean serve?"),
        (["--verison"], "unknown flag --verison; did you mean --version?"),
        (["serve", "--max-model-length", "4"], "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["serve", "--max-model", "4"], "unknown flag --max-model; did you mean --max-model-len?"),
        (["serve", "--prot=4"], "unknown flag --prot; did you mean --port?"),
        (["serve", "smollm2", "extra"], "unknown argument extra"),
        (["serve", "smollm2", "--model", "fake"], "smollm2 and --model fake are two models; name one"),
        (
            ["serve", "--predictor-cache", "no"],
            "--predictor-cache no: it takes no value; --predictor-cache turns it on, ",
        ),
        (["serve", "--ui=off", "fake"], "--ui off: it takes no value; --ui turns it on, --no-ui off"),
        (["serve", "--distributed-executor-backend", "ray"], "; --launcher says what starts ranks: process"),
        (
            ["serve", "m", "--ep-size", "2"],
            "--ep-size; with --tensor-parallel-size each rank has",
        ),
        (["serve", "--ssl-keyfile=k"], "unknown flag --ssl-keyfile; its name here is --tls-key"),
        (["serve", "--enable-prefix-caching"], "it is on by itself; see --prefix-cache (see eventlm serve --help)"),
        (["serve", "-m", "x"], "unknown flag -m; its name here is --model"),
        (["generate", "x", "--ssl-certfile", "c"], "unknown flag --ssl-certfile (see"),
        (["generate", "x", "--set", "max_tokens=8"], "unknown flag --set; did you mean --max-tokens?"),
        (["generate", "--set=bad_word=y", "x"], "unknown flag --set; did you mean --bad-word?"),
        (["generate", "x", "--set", "colour=red"], "unknown flag --set (see"),
        (["replay", "--seed", "7"], "unknown flag --seed (see"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["serve", "--port", "x", "--print-config"], "--port 'x': must be an integer from 0 to 65535"),
        (["serve", "--config", "/nowhere.toml"], "cannot read the configuration /nowhere.toml: No such file"),
        (["bench"], "KIND; known: serve, throughput, latency, step (see eventlm bench --help)"),
        (["trace"], "the following arguments are required: ACTION; known: info, stats, ls, "),
        (["trace", "chek", "x"], "unknown action 'chek'; did you mean check?"),
        (["trace", "check", "--strickt", "x"], "unknown flag --strickt; did you mean --strict?"),
        (["trace", "check", "/nowhere.jsonl"], "cannot read the trace /nowhere.jsonl: No such file or directory"),
        (["replay"], "no run is recorded in "),
        (["generate", "--port", "1", "x"], "unknown flag --port"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in error_of(capsys, *arguments)


@pytest.mark.parametrize("words", [["fake"], ["--model", "fake"], ["fake", "--model", "fake"], ["--port", "1", "fake"]])
def test_a_model_needs_no_flag(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for command in ("serve", "chat"):
        if command == "serve" or "--port" not in words:
            assert main([command, *words, "--print-config"]) == 0
            assert 'model = "fake"' in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_describes_and_gives_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: eventlm {command}")
    assert text.partition("examples:")[2].count("eventlm") >= 2


TRACE_ACTIONS = ("info", "stats", "ls", "grep", "diff", "export", "import", "check", "repair")
ACTIONS = [
    *(("trace", action) for action in TRACE_ACTIONS),
    *(("bench", kind) for kind in ("serve", "throughput", "latency", "step")),
]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS), *ACTIONS], ids=" ".join)
def test_help_fits_the_terminal_and_fills_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > columns] == []
    prose = lines[lines.index("") + 1 :]
    prose = prose[: prose.index("")]
    # No line of the description could have held the next one's first word.
    assert all(len(line) + 1 + len(after.split()[0]) > columns - 2 for line, after in pairwise(prose))


def test_without_a_command_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(command in captured.err for command in COMMANDS)


def test_version_is_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"eventlm {__version__}"


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_run", interrupt)
    assert main([]) == 128 + signal.SIGINT


def test_a_defect_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(program, "_run", fail)
    with pytest.raises(ZeroDivisionError):
        main([])


def run(*arguments: str | bytes, **keywords: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eventlm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **keywords)  # type: ignore[call-overload,no-any-return]


def test_a_reader_that_leaves_early_is_not_complained_of() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "eventlm", "policies"], stdout=stdout, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "eventlm", "policies"], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == b"eventlm: error: cannot write the output: No space left on device\n"


def test_an_argument_that_is_not_utf8_is_an_error() -> None:
    done = run("serve", b"--model=\xff", env=os.environ | {"PYTHONUTF8": "1"})
    assert done.returncode == 2
    assert "is not valid UTF-8" in done.stderr


@pytest.mark.parametrize("arguments", [["policies"], ["replay", "--help"], ["trace", "info", "/nowhere"], ["--help"]])
def test_light_commands_load_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom eventlm.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        f"print(sorted({set(HEAVY)!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_third_partys_policy_is_listed_like_a_built_in(tmp_path: Path) -> None:
    package = tmp_path / "site"
    (package / "slow_first").mkdir(parents=True)
    (package / "slow_first" / "__init__.py").write_text(
        "from eventlm.core.plugin import Policy\n\n\n"
        "class SlowFirst(Policy, frozen=True, kw_only=True):\n"
        '    """The longest prompt goes first."""\n\n'
        "    patience_ms: int = 250\n\n"
        "    def keys(self, sequences, now_ns):\n"
        "        return [-sequence.prompt_tokens for sequence in sequences]\n"
    )
    info = package / "slow_first-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-first\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[eventlm.policies]\nslow_first = slow_first:SlowFirst\n")
    done = run("policies", env=os.environ | {"PYTHONPATH": str(package)})
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    index = next(index for index, line in enumerate(lines) if "slow_first" in line)
    assert lines[index].split() == ["policy", "slow_first", "slow-first", "patience_ms=250"]
    assert lines[index + 1] == "    The longest prompt goes first."


@pytest.mark.parametrize("columns", [80, 50, 120])
def test_the_table_of_plug_ins_fits_the_terminal_and_is_aligned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["policies"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert max(map(len, [heading, *lines])) <= max(columns, heading.index("PARAMETERS") + 24)
    rows = [line for line in lines if not line.startswith(" ")]
    assert len(rows) == sum(map(len, BUILT_IN.values()))
    for line in rows:
        assert line[heading.index("ORIGIN") :].startswith("built-in")
        assert line[heading.index("PARAMETERS") - 1] == " " != line[heading.index("PARAMETERS")]
    assert "multiplier=1.5," in "".join(rows)


INTERRUPTED_WHILE_LOADING = """\
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "eventlm.cli.parser":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["eventlm", "--version"]
from eventlm.__main__ import program
sys.exit(program())
"""


def test_an_interrupt_while_the_program_loads_shows_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_WHILE_LOADING], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_where_interrupts_are_ignored_they_stay_so() -> None:
    # As in a shell script's background jobs.
    done = subprocess.run(
        [sys.executable, "-c", "import signal; signal.signal(2, signal.SIG_IGN)\n" + INTERRUPTED_WHILE_LOADING],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"eventlm {__version__}\n", "")
