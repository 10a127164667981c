"""Which of the server's error handlers, the bodies of `except` clauses, have run.

Modules that are imported after `watch` are compiled with a mark at the start of each handler, which costs next to
nothing.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from tests.layout import ROOT

_PACKAGES = ("eventlm.bus", "eventlm.engine", "eventlm.server", "eventlm.frontend", "eventlm.gateway")
_MARK = "__eventlm_handler_has_run__"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _always() -> bool:
    return True


#: The handlers that have run, and all that are watched.
has_run: set[str] = set()
watched: set[str] = set()
#: Whether a handler that runs now counts. Those that run while the remains of a dead process are collected do not.
counts: Callable[[], bool] = _always


@cache
def all_handlers() -> frozenset[str]:
    """The names of all handlers, such as `eventlm/bus/recorder.py Recorder.write except OSError`. The second one with
    the same name in a function has a 2 after it.
    """
    folders = [ROOT / package.replace(".", "/") for package in _PACKAGES]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return frozenset(name for path in paths for name, _ in _handlers_of(path, ast.parse(path.read_bytes())))


def watch() -> None:
    """Note which handlers run, in modules that are imported from now on."""
    setattr(builtins, _MARK, _note)
    sys.meta_path.insert(0, _Finder())


def _note(name: str) -> None:
    if counts():
        has_run.add(name)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not any(fullname == package or fullname.startswith(f"{package}.") for package in _PACKAGES):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile with marks. Cached code has none."""
        path = Path(self.path)
        tree = ast.parse(path.read_bytes())
        for name, handler in _handlers_of(path, tree):
            watched.add(name)
            mark = ast.Expr(ast.Call(ast.Name(_MARK, ast.Load()), [ast.Constant(name)], []))
            handler.body.insert(0, ast.copy_location(mark, handler.body[0]))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


def _handlers_of(path: Path, tree: ast.Module) -> Iterator[tuple[str, ast.ExceptHandler]]:
    counts: Counter[str] = Counter()
    for function, handler in _in_functions(tree, ""):
        head = "except" if handler.type is None else f"except {ast.unparse(handler.type)}"
        name = f"{path.resolve().relative_to(ROOT)} {function}{head}"
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name} {counts[name]}"), handler


def _in_functions(node: ast.AST, function: str) -> Iterator[tuple[str, ast.ExceptHandler]]:
    """All handlers below a node, each with its function or class and a space."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield from _in_functions(child, f"{function.rstrip()}.{child.name} ".lstrip("."))
        else:
            if isinstance(child, ast.ExceptHandler):
                yield function, child
            yield from _in_functions(child, function)
