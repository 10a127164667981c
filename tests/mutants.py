"""Mutation test: do the tests of a module fail where one small thing in it is wrong?

    python -m tests.mutants --count 200 --seed 1 --to mutants.jsonl

Draws mutants of the modules in `PACKAGES`, and runs the tests of each module (`tests.layout`) on a copy of the tree
with the mutant in it. A mutant is killed if they fail or do not end in time. Results are appended, a JSON line each;
mutants that are in the file already are not run again. `--sample FILE` takes the mutants from the results of another
commit, where their line is still there, in a function of the same name.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.layout import ROOT, tests_of

#: Folders whose modules are mutated; `--sample` finds a mutant again in another of them.
PACKAGES = (
    "eventlm/core",
    "eventlm/bus",
    "eventlm/engine",
    "eventlm/frontend",
    "eventlm/metrics",
    "eventlm/server",
    "eventlm/text",
)
#: What a module's tests may take.
LIMIT_SECONDS = 240
COPIED = ("eventlm", "kernels", "policies", "replay", "benchmarks", "tests", "pyproject.toml", "Makefile", "README.md")

_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


class Mutant(NamedTuple):
    """One change of one line. `place` says which of the equal changes in a function of that name it is."""

    module: str
    function: str
    kind: str
    before: str
    after: str
    place: int


class Site(NamedTuple):
    """Where a mutant is made: offsets in the source's UTF-8 bytes."""

    mutant: Mutant
    start: int
    end: int


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, text after) of each way to change a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed = copy.copy(node)
        changed.ops = [_FLIPPED[type(node.ops[0])]()]
        yield "comparison", f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BoolOp):
        swapped = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        yield "and/or", f"({ast.unparse(swapped)})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "+1", str(node.value + 1)
        yield "-1", f"({node.value - 1})"
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return None", "return None"
    elif isinstance(node, ast.Assign | ast.AugAssign) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    ):
        yield "removed", "pass"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _inside(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body that run: no annotations, and no functions in it."""
    pending: list[ast.AST] = list(reversed(function.body))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield node
        children = [child for child in ast.iter_child_nodes(node) if child is not getattr(node, "annotation", None)]
        # A text is no place for a number, and a pattern must stay one.
        if not isinstance(node, ast.JoinedStr | ast.pattern):
            pending.extend(reversed(children))


def sites(root: Path, path: Path) -> list[Site]:
    """All mutants of a module, in the order of its text."""
    text = path.read_text()
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    module = str(path.relative_to(root))
    found: list[Site] = []
    counts: dict[tuple[str, ...], int] = {}
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in _inside(function):
            for kind, after in changes(node):
                assert isinstance(node, ast.expr | ast.stmt)
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                line = text.splitlines()[node.lineno - 1].strip()
                equal = (function.name, kind, line)
                place = counts[equal] = counts.get(equal, -1) + 1
                found.append(Site(Mutant(module, function.name, kind, line, after, place), start, end))
    return found


def all_sites(root: Path) -> list[Site]:
    """Of every module in `PACKAGES`."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return [site for path in paths for site in sites(root, path)]


def found_again(sample: list[Mutant], found: list[Site]) -> list[Site | None]:
    """The sites of another commit's mutants: the same change of the same line in a function of the same name."""
    by_change: dict[tuple[str, str, str, int], list[Site]] = {}
    for site in found:
        mutant = site.mutant
        by_change.setdefault((mutant.function, mutant.kind, mutant.before, mutant.place), []).append(site)
    again: list[Site | None] = []
    for mutant in sample:
        same = by_change.get((mutant.function, mutant.kind, mutant.before, mutant.place), [])
        again.append(next((site for site in same if site.mutant.module == mutant.module), same[0] if same else None))
    return again


def run_tests(folder: Path, tests: list[str]) -> str:
    """Of the tree in `folder`: "passed", "failed" or "timeout"."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=-m 'not soak'", f"--timeout={LIMIT_SECONDS // 2}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "passed" if process.wait(LIMIT_SECONDS) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        # Processes that its tests have started end with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outcome_of(folder: Path, site: Site, healthy: dict[str, bool]) -> str:
    """Run a module's tests with the mutant in it. `healthy` keeps which modules' tests pass without one."""
    module = site.mutant.module
    if not (tests := tests_of(module)):
        return "no tests"
    path = folder / module
    original = path.read_bytes()
    path.write_bytes(original[: site.start] + site.mutant.after.encode() + original[site.end :])
    try:
        outcome = run_tests(folder, tests)
    finally:
        path.write_bytes(original)
    if outcome == "passed":
        return "survived"
    if module not in healthy:
        healthy[module] = run_tests(folder, tests) == "passed"
    return ("killed" if outcome == "failed" else "timeout") if healthy[module] else "tests fail without it"


def main() -> None:
    """Draw, run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--to", type=Path, default=Path("mutants.jsonl"), help="file of the results")
    parser.add_argument("--sample", type=Path, help="results of another commit, whose mutants are run")
    parser.add_argument("--at-most", type=int, default=1_000_000, help="how many to run this time")
    arguments = parser.parse_args()

    found = all_sites(ROOT)
    if arguments.sample:
        lines = [json.loads(line) for line in arguments.sample.read_text().splitlines()]
        sample = [Mutant(*line["mutant"]) for line in lines]
        chosen = found_again(sample, found)
    else:
        chosen = list(random.Random(arguments.seed).sample(found, arguments.count))
        sample = [site.mutant for site in chosen if site]
    done = arguments.to.read_text().splitlines() if arguments.to.exists() else []
    results = [json.loads(line) for line in done]

    with tempfile.TemporaryDirectory(prefix="mutants") as name:
        folder = Path(name)
        for each in COPIED:
            if (ROOT / each).is_dir():
                shutil.copytree(ROOT / each, folder / each, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / each, folder / each)
        healthy: dict[str, bool] = {}
        for number, site in list(enumerate(chosen))[len(results) :][: arguments.at_most]:
            outcome = outcome_of(folder, site, healthy) if site else "gone"
            results.append({"mutant": sample[number], "outcome": outcome})
            with arguments.to.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
            print(f"{number + 1}/{len(chosen)} {outcome}: {' '.join(map(str, sample[number]))}", flush=True)
    outcomes = [result["outcome"] for result in results]
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})


if __name__ == "__main__":
    main()
