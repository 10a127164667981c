"""Python code on the pages compiles, and imports what there is."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, name

BLOCKS = [
    (page, code) for page in PAGES for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)
]


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[name(page) for page, _ in BLOCKS])
def test_code_compiles_and_imports_what_there_is(page: Path, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eventlm"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


@pytest.mark.parametrize("code", [code for page, code in BLOCKS if page.name == "python.md"])
def test_programs_of_the_page_run(code: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = re.sub('"smollm2(:bf16)?"', '"fake"', code)
    exec(compile(code, "python.md", "exec"), {"__name__": "example"})
    assert capfd.readouterr().out.strip()
