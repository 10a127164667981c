"""Modules become one script, and what cannot be joined is said in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from eventlm.page.linker import STATIC, LinkError, link, link_styles

OWN = sorted(path for path in Path(str(STATIC)).iterdir() if path.suffix == ".js")


def write(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(LinkError) as caught:
        link("entry.js", folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_joined_runs_in_the_order_of_imports(browser: Browser, tmp_path: Path) -> None:
    write(
        tmp_path,
        entry=(
            'import { h as make } from "preact";\n'
            'import {\n  twice,\n  Box as Held,\n} from "./middle.js";\n'
            'import { log } from "./last.js";\n'
            'import uPlot from "uplot";\n'
            "export const answer = [twice(4), new Held().value, typeof make, typeof uPlot, ...log];\n"
            "globalThis.answer = answer;\n"
        ),
        middle=(
            'import { log } from "./last.js";\nconst own = 2;\nlog.push("middle");\n'
            "export function twice(value) {\n  return own * value;\n}\n"
            "export class Box {\n  value = own;\n}\nexport async function later() {}\n"
        ),
        last='const own = "last";\nexport const log = [own];\n',
    )
    script = link("entry.js", tmp_path)
    assert script.count("/* last.js */") == 1
    page = browser.new_page()
    page.evaluate(script)
    assert page.evaluate("answer") == [8, 2, "function", "function", "last", "middle"]
    assert page.evaluate("typeof own") == "undefined"
    page.close()


def test_licences_of_what_it_contains_are_in_it(tmp_path: Path) -> None:
    script = link("entry.js", write(tmp_path, entry='import { h } from "preact";\n'))
    assert script.count("The MIT License (MIT)") == 1
    assert "Jason Miller" in script
    assert "sourceMappingURL" not in script
    assert "MIT" not in link("entry.js", write(tmp_path, entry="const here = 1;\n"))


def test_a_missing_module_is_named_with_who_asks(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith("the page imports ./entry.js, which does not exist in ")
    write(tmp_path, entry='import { a } from "./none.js";\n')
    said = refusal(tmp_path)
    assert said.startswith("entry.js imports ./none.js, which does not exist in ")
    assert str(tmp_path) in said


@pytest.mark.parametrize("source", ["react", "../a.js", "https://a/b.js", "./a.mjs", "./a/b.js"])
def test_nothing_else_can_be_imported(tmp_path: Path, source: str) -> None:
    write(tmp_path, entry=f'import {{ a }} from "{source}";\n')
    assert refusal(tmp_path).startswith(f'entry.js imports "{source}", which is neither ./NAME.js nor one of preact, ')


def test_a_circle_is_shown(tmp_path: Path) -> None:
    write(tmp_path, entry='import { b } from "./b.js";\n', b='import { c } from "./c.js";\n')
    write(tmp_path, c='import { b } from "./b.js";\n')
    assert refusal(tmp_path) == "modules import each other in a circle: b.js → c.js → b.js"


def test_a_name_that_is_not_exported_is_shown(tmp_path: Path) -> None:
    write(tmp_path, entry='import { a, b } from "./other.js";\n', other="export const a = 1;\n")
    assert refusal(tmp_path) == "entry.js imports b from ./other.js, which does not export it"
    write(tmp_path, entry='import { useNothing } from "preact/hooks";\n')
    assert refusal(tmp_path) == "entry.js imports useNothing from preact/hooks, which does not export it"


def test_two_modules_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, entry='import { Chart } from "./chart.js";\n', chart="export const Chart = 1;\n")
    assert "entry.js imports ./chart.js, which exists more than once: " in refusal(tmp_path)


@pytest.mark.parametrize(
    "line", ["export default 1;", "export let a = 1;", 'export { a } from "./b.js";', 'import * as a from "./b.js";']
)
def test_other_forms_are_refused(tmp_path: Path, line: str) -> None:
    write(tmp_path, entry=line + "\n", b="export const a = 1;\n")
    assert refusal(tmp_path) == f"./entry.js: this form of import or export is not supported: {line}"


@pytest.mark.parametrize("text", ['"</script>"', '"</SCRIPT"', '"<!--"'])
def test_no_module_can_end_the_script(tmp_path: Path, text: str) -> None:
    write(tmp_path, entry=f"const a = {text};\n")
    assert refusal(tmp_path) == "./entry.js: a script in HTML may contain neither </script nor <!--"


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_module_of_ours_makes_html_or_code_of_text(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"inner[hH][tT][mM][lL]|outerHTML|insertAdjacentHTML|document\.write|InnerHTML", text)
    assert not re.search(r"\beval\b|new Function|setTimeout\(\s*[\"'`]|https?://|\bimport\(|\bfetch\(", text)
    assert max(map(len, text.splitlines())) <= 120


def test_styles_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.css").write_text(".b {}")
    (tmp_path / "a.css").write_text(".a {}")
    styles = link_styles(tmp_path)
    places = [styles.index(each) for each in (".uplot", "--page:", ".card {", ".a {", ".b {")]
    assert places == sorted(places)
    assert not re.search(r"url\(|@import|</style", styles)
