"""What the host gives is handed in: only the modules named here may reach for it, and there will be fewer."""

from __future__ import annotations

import ast

import pytest

from eventlm.engine.setup import make_run_id
from eventlm.system.system import real_system
from tests.layout import ROOT

PACKAGES = ("bus", "engine", "frontend", "metrics", "server", "text")
#: What reads a clock or draws. `datetime` may be used to show a time that was handed in.
TIME_AND_CHANCE = {"time", "random", "secrets", "uuid", "now", "utcnow", "today", "urandom", "getrandom"}
#: What reads or writes files, or starts threads or processes.
MODULES_OF_THE_HOST = {
    "concurrent", "fcntl", "io", "mmap", "multiprocessing", "os", "queue", "shutil", "subprocess", "tempfile",
    "threading",
}  # fmt: skip
CALLS_OF_THE_HOST = {
    "create_subprocess_exec", "create_subprocess_shell", "exists", "glob", "is_dir", "is_file", "is_symlink", "iterdir",
    "mkdir", "read_bytes", "read_text", "rglob", "rmdir", "run_in_executor", "samefile", "stat", "symlink_to",
    "to_thread", "touch", "write_bytes", "write_text",
}  # fmt: skip
EXEMPT = {
    # A template may print today's date.
    "text/chat_template.py",
    # These keep measurements for other runs, describe the machine in the header, and find the user's plug-ins.
    "engine/predictor/cache.py",
    "engine/setup.py",
    "engine/plugins/registry.py",
    # These read files that an operator may replace while a server runs.
    "server/http/tls.py",
    # SQLite opens its files itself.
    "engine/object_store/database.py",
    # The pages are part of the package.
    "server/chat_page/files.py",
    # The disk is handed in; it is called in threads of the loop, and its errors are put into words.
    "server/batches/files.py",
    "server/batches/folder.py",
    "server/batches/line_runner.py",
    "server/batches/worker.py",
}


def reaches_out(source: str, *, may_use_files: bool = False) -> bool:
    """Whether a module imports what a system hands out, or calls it of another module."""
    modules = TIME_AND_CHANCE if may_use_files else TIME_AND_CHANCE | MODULES_OF_THE_HOST
    calls = TIME_AND_CHANCE if may_use_files else TIME_AND_CHANCE | CALLS_OF_THE_HOST
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and modules & {alias.name.split(".")[0] for alias in node.names}:
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in modules:
            return True
        if not isinstance(node, ast.Call):
            continue
        # A loop that was handed in has a clock of its own.
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) != "self._loop.time":
            if node.func.attr in calls:
                return True
        elif isinstance(node.func, ast.Name) and node.func.id == "open" and not may_use_files:
            return True
    return False


def found() -> set[str]:
    root = ROOT / "eventlm"
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    assert len(paths) > 100
    texts = root / "text"
    return {
        str(path.relative_to(root))
        for path in paths
        # The folder of text reads the files of tokenizers.
        if reaches_out(path.read_text(), may_use_files=path.is_relative_to(texts))
    }


def test_only_exempt_modules_reach_out() -> None:
    assert found() - EXEMPT == set(), "take it from eventlm.system, by the constructor"
    assert EXEMPT - found() == set(), "these are converted: take them out of the list"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time", True),
        ("from secrets import token_hex", True),
        ("def f():\n    import random", True),
        ("from datetime import datetime\ndatetime.now()", True),
        ("import os\nos.urandom(3)", True),
        ("from datetime import datetime\ndatetime.fromtimestamp(3)", False),
        ("import asyncio\nasyncio.get_running_loop().time()", True),
        ("self._loop.time()", False),
        ("import timeit", False),
        ("import os\nos.fspath(path)", True),
        ("from concurrent.futures import ThreadPoolExecutor", True),
        ("open(path)", True),
        ("disk.open(path)", False),
        ("Path(path).read_text()", True),
        ("asyncio.to_thread(work)", True),
    ],
)
def test_what_reaches_out(source: str, expected: bool) -> None:
    assert reaches_out(source) is expected


class Clock:
    def monotonic_ns(self) -> int:
        return 5

    def unix_ns(self) -> int:
        return 86_400 * 10**9


class Chance:
    def token_bytes(self, num_bytes: int) -> bytes:
        return bytes(range(num_bytes))


def test_a_run_is_named_by_the_clock_and_the_chance_that_are_handed_in() -> None:
    assert make_run_id(real_system()._replace(clock=Clock(), chance=Chance())) == "19700102-000000-000102"
    real = real_system()
    assert make_run_id(real) != make_run_id(real)
