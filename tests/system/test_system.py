"""Clock and chance are handed in: only modules named here may reach for them, and there will be fewer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from eventlm.engine.setup import make_run_id
from eventlm.system.system import System, real_system
from tests.layout import ROOT

PACKAGES = ("bus", "engine", "frontend", "metrics", "server", "text")
#: What reads a clock or draws. `datetime` may be used to show a time that was handed in.
FORBIDDEN_MODULES = {"time", "random", "secrets", "uuid"}
FORBIDDEN_CALLS = {"now", "utcnow", "today", "time", "urandom", "getrandom"}
#: Not converted yet. Take a module out when it is; never put one in.
EXEMPT = {
    "bus/log_writer.py",
    "bus/recorder.py",
    "engine/replicas/start_phases.py",
    "engine/replicas/worker_process.py",
    "frontend/front_end.py",
    "server/auth/api_keys.py",
    "server/context.py",
    "server/endpoints/embeddings.py",
    "server/http/connection.py",
    "server/http/headers.py",
    "server/middleware.py",
    "server/responses.py",
    "text/chat_template.py",
    "text/generation.py",
}


def reaches_out(path: Path) -> bool:
    """Whether a module imports a clock or a source of chance, or calls one of another module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import) and FORBIDDEN_MODULES & {alias.name.split(".")[0] for alias in node.names}:
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN_CALLS:
            return True
    return False


def found() -> set[str]:
    root = ROOT / "eventlm"
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    assert len(paths) > 100
    return {str(path.relative_to(root)) for path in paths if reaches_out(path)}


def test_only_exempt_modules_read_a_clock_or_draw() -> None:
    assert found() - EXEMPT == set(), "take the clock and the chance from eventlm.system, by the constructor"
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
        ("import timeit", False),
    ],
)
def test_what_reaches_out(tmp_path: Path, source: str, expected: bool) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert reaches_out(path) is expected


class Clock:
    def monotonic_ns(self) -> int:
        return 5

    def unix_ns(self) -> int:
        return 86_400 * 10**9


class Chance:
    def token_bytes(self, num_bytes: int) -> bytes:
        return bytes(range(num_bytes))


def test_a_run_is_named_by_the_clock_and_the_chance_that_are_handed_in() -> None:
    assert make_run_id(System(Clock(), Chance())) == "19700102-000000-000102"
    real = real_system()
    assert make_run_id(real) != make_run_id(real)
