"""Which branches of the server's error handling have run: the bodies of `except` clauses."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

from tests.layout import ROOT

PACKAGES = ("eventlm/bus", "eventlm/engine", "eventlm/server", "eventlm/frontend", "eventlm/gateway")


@cache
def all_handlers() -> dict[tuple[str, int], str]:
    """Their names by file and first line of the body: `eventlm/bus/recorder.py:57 except OSError`."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {
        (str(path), handler.body[0].lineno): f"{path.relative_to(ROOT)}:{handler.lineno} {_head(handler)}"
        for path in paths
        for handler in _handlers_of(ast.parse(path.read_text()))
    }


def _handlers_of(tree: ast.Module) -> Iterator[ast.ExceptHandler]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))


def _head(handler: ast.ExceptHandler) -> str:
    return f"except {ast.unparse(handler.type)}" if handler.type is not None else "except"


class HandlerTrace:
    """Notes which of them run, while it is entered. It makes a run three times as long."""

    def __init__(self) -> None:
        self._lines: dict[str, set[int]] = {}
        for file, line in all_handlers():
            self._lines.setdefault(file, set()).add(line)
        self._codes: dict[CodeType, bool] = {}
        self._seen: set[tuple[str, int]] = set()

    @property
    def names(self) -> list[str]:
        """Of those that have run."""
        return sorted(all_handlers()[each] for each in self._seen)

    def __enter__(self) -> HandlerTrace:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        has_handlers = self._codes.get(code)
        if has_handlers is None:
            lines = self._lines.get(code.co_filename, set())
            own = {line for _, _, line in code.co_lines() if line is not None}
            has_handlers = self._codes[code] = not lines.isdisjoint(own)
        return self._on_line if has_handlers else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno in self._lines[frame.f_code.co_filename]:
            self._seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line
