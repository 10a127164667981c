"""The tests lie as the modules do: each module has test files of its name, except for those in `layout.toml`."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

from tests.layout import ROOT, TESTED_ELSEWHERE, modules, twins

#: How many modules may have no tests of their own. Lower it when one gets them; never raise it.
MOST_WITHOUT = 86


def test_every_module_has_tests_of_its_name() -> None:
    without = {module for module in modules() if not twins(module)}
    assert sorted(without - TESTED_ELSEWHERE.keys()) == [], "write tests/.../test_<module>.py"
    assert sorted(TESTED_ELSEWHERE.keys() - without) == [], "these have tests or are gone: take them out of layout.toml"


def test_exceptions_become_fewer() -> None:
    assert len(TESTED_ELSEWHERE) <= MOST_WITHOUT


def test_what_an_exception_is_tested_with_is_there() -> None:
    named = {file for files in TESTED_ELSEWHERE.values() for file in files}
    assert [file for file in sorted(named) if not (ROOT / file).is_file()] == []
    assert all(TESTED_ELSEWHERE.values())


def test_the_list_is_in_order() -> None:
    listed = tomllib.loads((ROOT / "tests/layout.toml").read_text())
    assert list(listed) == sorted(listed)


def test_no_two_test_files_have_one_module() -> None:
    """A longer name that begins like another's is its own module's."""
    assert twins("eventlm/core/state/replica.py") == ["tests/core/state/test_replica.py"]
    assert twins("eventlm/core/routing.py") == ["tests/core/test_routing.py"]
    assert "tests/engine/test_inference_engine_blocks.py" in twins("eventlm/engine/inference_engine.py")
    owned = [file for module in modules() for file in twins(module)]
    assert len(owned) == len(set(owned))
    assert all(Path(file).name.startswith("test_") for file in owned)


def test_no_two_public_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for module in modules()
        for node in ast.parse((ROOT / module).read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
