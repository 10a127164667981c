"""The test that comes with a shrunk workload: it fails while the problem is there, and passes once it is fixed."""

from __future__ import annotations

import os
import pprint
import re
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import msgspec

from eventlm.errors import UsageError
from eventlm.replay.cost.backend_model import AnyCost

_TEMPLATE = '''\
"""{doc}"""

from __future__ import annotations
{imports}
from pathlib import Path

from eventlm.replay.predicate.trial import holds_in
{path}
WORKLOAD = Path(__file__).parent / {workload}
#: What went wrong. The test passes when it no longer does.
CONDITION = {condition}
OPTIONS = {options}
COST_MODEL = {cost}


def test_{name}() -> None:
    assert not holds_in(WORKLOAD, CONDITION, options=OPTIONS, cost_model=COST_MODEL)
'''


def write_stub(
    path: Path | str, workload: Path | str, condition: str, options: Mapping[str, Any], cost: AnyCost
) -> None:
    """Write a pytest file for a workload that has been written. Raises UsageError if it cannot be written.

    Where a plug-in is a module of the working directory, the test finds it there.
    """
    target = Path(path)
    is_local = any(PathFinder.find_spec(module, [os.getcwd()]) for module in _modules(options))
    plugins = _literal(os.path.relpath(Path.cwd(), target.resolve().parent))
    name = re.sub(r"\W", "_", target.stem).removeprefix("test_") or "it"
    text = _TEMPLATE.format(
        doc="A problem in a small workload, which `eventlm shrink` made.",
        imports="\nimport sys" if is_local else "",
        path=f"\n# The plug-ins.\nsys.path.append(str(Path(__file__).parent / {plugins}))\n" if is_local else "",
        workload=_literal(os.path.relpath(Path(workload).resolve(), target.resolve().parent)),
        condition=_literal(condition),
        options=_literal(msgspec.to_builtins(dict(options))),
        cost=_literal(msgspec.to_builtins(cost)),
        name=name,
    )
    try:
        target.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write the test {path}: {error.strerror}; choose another file") from error


def _modules(options: object) -> Iterator[str]:
    """The outermost modules of plug-ins that are given as `module:Class`."""
    if isinstance(options, Mapping):
        name = options.get("type")
        if isinstance(name, str) and ":" in name:
            yield re.split("[.:]", name)[0]
        for each in options.values():
            yield from _modules(each)
    elif isinstance(options, list | tuple):
        for each in options:
            yield from _modules(each)


def _literal(value: object) -> str:
    return pprint.pformat(value, width=100, sort_dicts=False)
