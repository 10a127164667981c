"""Headers that were made up, with right hashes: whatever reads a trace refuses them alike, at once and in one line."""

from __future__ import annotations

import argparse
import copy
import io
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.token_log_check import check_token_logs
from eventlm.bus.trace_grep import Query, grep
from eventlm.bus.trace_info import check
from eventlm.bus.trace_repair import repair
from eventlm.cli import main as command_line
from eventlm.cli.trace import command as trace
from eventlm.cli.trace import ls as trace_ls
from eventlm.cli.trace import stats as trace_stats
from eventlm.config import Config, CoreConfig
from eventlm.config.core import MAX_BLOCKS, MAX_REPLICAS
from eventlm.config.load import redacted
from eventlm.errors import EventLMError, TraceCorruptError, UsageError
from eventlm.events.codec import chain, close_line
from eventlm.events.header_check import MAX_DEPTH, MAX_HEADER_BYTES
from eventlm.replay.cost.files import fit_trace
from eventlm.replay.diff.diff import diff, read_side
from eventlm.replay.execute.executable import computed
from eventlm.replay.explain.explainer import explain
from eventlm.replay.explain.rank import rank
from eventlm.replay.export.tables import export
from eventlm.replay.verify.verifier import verify
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.what_if import what_if
from eventlm.replay.workload.source import load_workload
from eventlm.types import PluginKind
from tests.replay.golden import FOLDER
from tests.replay.traces import Objects, read_objects

GOLDEN = FOLDER / "edf_tight.jsonl"
#: Up to the first steps, with a request that a reader can be asked about.
NUM_LINES, REQUEST = 16, 2
DELETED = object()
#: Where a string stands in a header for bytes that no encoder makes.
PLACE = "@@"
DEEP = b"[" * 900 + b"]" * 900
HOSTILE = [
    *(DELETED, None, -1, 10**9, 2**64, 1.5, "abc", "\x1b[31m/", "x" * 1_100_000),
    *([], ["a"], [-1], [10**9] * 5, {}, DEEP),
]
#: Of the configuration and the host, of which only `--execute` reads some, and of plug-ins' parameters.
HOSTILE_DETAILS = [None, -1, [], DEEP]
OPTIONS = {"model": ["dtype", "fake"], "worker": ["step_timeout_seconds"]}
HOST = {"device": "cpu", "threads": 2}
#: What hangs does so for longer; what does not takes milliseconds, on a busy machine more.
SECONDS = 10.0
BYTES = 3 << 29
MOST_PRINTED = 20_000


class Mutant(NamedTuple):
    """A header with one field changed, as the bytes of its line."""

    name: str
    body: bytes


def _header() -> dict[str, Any]:
    """Of a golden trace, with one plug-in of each kind and some of what a real one has besides."""
    header = read_objects(GOLDEN)[0]
    plugins = [next(each for each in header["plugins"] if each["kind"] == kind) for kind in get_args(PluginKind)]
    options = redacted(Config())
    config = {section: {name: options[section][name] for name in names} for section, names in OPTIONS.items()}
    return header | {"plugins": plugins, "config": config, "host": HOST, "seeds": {"requests": "1"}}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from _paths(child, (*path, key))


def _mutants() -> Iterator[Mutant]:
    header = _header()
    for path in _paths(header):
        if path[0] in ("t", "format", "schema", "behaviour"):
            continue
        is_detail = (path[0] in ("config", "host") and len(path) > 1) or (path[0] == "plugins" and len(path) > 3)
        for value in HOSTILE_DETAILS if is_detail else HOSTILE:
            yield Mutant(f"{'.'.join(map(str, path))} = {str(value)[:20]}", _changed(header, path, value))


def _changed(header: dict[str, Any], path: tuple[Any, ...], value: object) -> bytes:
    changed = copy.deepcopy(header)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is DELETED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = PLACE if isinstance(value, bytes) else value
    body = msgspec.json.encode(changed)[:-1]
    return body.replace(f'"{PLACE}"'.encode(), value) if isinstance(value, bytes) else body


def _write(path: Path, header: bytes, rest: Objects) -> Path:
    previous_h, lines = "", []
    for body in [header, *(msgspec.json.encode(item)[:-1] for item in rest)]:
        previous_h = chain(previous_h, body)
        lines.append(close_line(body, previous_h))
    path.write_bytes(b"".join(lines))
    return path


def _open(path: Path) -> object:
    with LogReader(path) as reader:
        return reader.header


def _grep(path: Path) -> object:
    with LogReader(path) as reader:
        return list(grep(reader, Query(request=REQUEST)))


def _computed(path: Path) -> object:
    """As `--execute` does before anything else; a trace without tokens goes no further."""
    with LogReader(path) as reader:
        try:
            return computed(reader.header)
        except msgspec.ValidationError as error:
            raise TraceCorruptError(str(error)) from error


#: All that reads traces, where it is not the command's own printing that may fail as its function.
READERS: dict[str, Callable[[Path], object]] = {
    "info": lambda path: trace.run_info(argparse.Namespace(path=str(path), strict=False, json=False)),
    "stats": lambda path: trace_stats.run(
        argparse.Namespace(path=str(path), strict=False, json=False, plot=None, from_time=None, to_time=None)
    ),
    "ls": lambda path: trace_ls.run(argparse.Namespace(folder=str(path.parent), full=True, json=False)),
    "check": check,
    "check token ids": check_token_logs,
    "grep": _grep,
    "diff": lambda path: diff(*[read_side(path)] * 2),
    "export": lambda path: export(path, path.parent / "out", to="csv"),
    "repair": repair,
    "explain": lambda path: explain(path, [(REQUEST, None)]),
    "explain --slowest": lambda path: rank(path, 3),
    "replay": verify,
    "replay --replicas": lambda path: what_if(path, [Alternative(num_replicas=2)]),
    "simulate": load_workload,
    "--cost-model": fit_trace,
    "replay --execute": _computed,
}


@pytest.fixture
def bounded() -> Iterator[Callable[[Callable[[Path], object], Path], str]]:
    """Reads a trace with a bound on time and memory; returns the name of the error, empty if there was none."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"it took more than {SECONDS} s")

    def read(reader: Callable[[Path], object], path: Path) -> str:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()):
                reader(path)
        except EventLMError as error:
            return type(error).__name__ if len(str(error)) < MOST_PRINTED else "a novel"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return "" if len(printed.getvalue()) < MOST_PRINTED else "a novel"

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (taken + BYTES, hard))
    yield read
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_every_reader_takes_a_made_up_header_or_reports_what_is_wrong(
    tmp_path: Path, bounded: Callable[[Callable[[Path], object], Path], str], stride: int
) -> None:
    """With a stride each header goes to some readers, in turn to all; fewer if it is refused, as it is in one place."""
    rest = read_objects(GOLDEN)[1:NUM_LINES]
    failures, num_refused = [], 0
    readers = list(READERS.items())
    for number, (name, body) in enumerate(_mutants()):
        path = _write(tmp_path / "trace.jsonl", body, rest)
        try:
            is_refused = bounded(_open, path) == "TraceCorruptError"
        except Exception:
            is_refused = False
        num_refused += is_refused
        step = stride**2 if is_refused else stride
        for command, reader in readers[number % step :: step]:
            try:
                found = bounded(reader, path)
            except Exception as error:
                failures.append(f"{command}: {name}: {type(error).__name__}: {str(error)[:80]}")
                continue
            if found == "a novel" or (is_refused and found != "TraceCorruptError" and command != "ls"):
                failures.append(f"{command}: {name}: {found or 'no error'}, refused: {is_refused}")
    assert not failures, f"{len(failures)} failures, among them\n" + "\n".join(failures[:20])
    assert num_refused > 400


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("core", "models"), [], r"core.models: Expected `array` of length >= 1"),
        (("core", "num_replicas"), 10**9, rf"core.num_replicas: Expected `int` <= {MAX_REPLICAS}"),
        (("core", "num_blocks"), MAX_BLOCKS + 1, rf"core.num_blocks: Expected `int` <= {MAX_BLOCKS}"),
        (("core", "num_blocks"), -1, "core.num_blocks: Expected `int` >= 2"),
        (("core", "block_size"), 513, "core.block_size: Expected `int` <= 512"),
        (("predictor",), [0, 0, -1, 0, 0], r"predictor\[2\]: Expected `int` >= 0"),
        (("predictor",), [0] * 4, "predictor: Expected `array` of length >= 5"),
        (("unix_start_ns",), "abc", "unix_start_ns: Expected `str` matching regex"),
        (("run",), "../up", "run: Expected `str` matching regex"),
        (("plugins",), [], "plugins: there is no policy"),
        (("plugins", 0, "kind"), "planner", r"plugins\[0\].kind: Invalid enum value 'planner'"),
        (("plugins", 0, "parameters"), {"type": "x:Y"}, r"plugins\[0\].parameters: none can be called `type`"),
        (("host", "a"), [[[]]] * 3, ""),
        (
            ("host", "a"),
            b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
            f"host: tables and lists are nested more than {MAX_DEPTH} deep",
        ),
        (("host", "a"), "x" * MAX_HEADER_BYTES, "no header is longer than"),
        (("ts",), -1, r"ts: -1 is not from 0 to 9223372036854775807"),
    ],
)
def test_an_error_in_a_header_names_its_field(
    tmp_path: Path, path: tuple[Any, ...], value: object, message: str
) -> None:
    trace = _write(tmp_path / "t", _changed(_header() | {"host": {"a": 0}}, path, value), read_objects(GOLDEN)[1:4])
    if not message:
        assert verify(trace).exit_code == 0
        return
    with pytest.raises(TraceCorruptError, match=rf"damaged at line 1, byte 0: .*{message}") as raised:
        verify(trace)
    assert raised.value.exit_code == 3


def test_replicas_cannot_have_more_blocks_than_an_engine(tmp_path: Path) -> None:
    header = _header()
    header["core"] |= {"num_replicas": 2, "num_blocks": MAX_BLOCKS}
    path = _write(tmp_path / "t", msgspec.json.encode(header)[:-1], [])
    with pytest.raises(TraceCorruptError, match="core: 2 replicas of 16,777,216 blocks are more than"):
        verify(path)
    with pytest.raises(ValueError, match="more than the 16,777,216 blocks"):
        CoreConfig(models=["m"], num_replicas=2, num_blocks=MAX_BLOCKS, max_model_len=64)


@pytest.mark.parametrize("command", ["replay", "explain --slowest 2", "trace stats", "trace info"])
def test_the_command_line_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    path = _write(tmp_path / "t", _changed(_header(), ("core", "num_replicas"), 10**9), read_objects(GOLDEN)[1:4])
    assert command_line.main([*command.split(), str(path)]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"eventlm: error: {path} is damaged at line 1, byte 0: no engine has such a header: ")
    assert error.count("\n") == 1


def test_a_plug_in_that_is_not_here_is_named_with_its_place(tmp_path: Path) -> None:
    path = _write(tmp_path / "t", _changed(_header(), ("plugins", 0, "name"), "ours"), read_objects(GOLDEN)[1:4])
    with pytest.raises(UsageError, match=r"line 1 of the trace names a policy .*: unknown policy 'ours'.*--policy"):
        verify(path)
