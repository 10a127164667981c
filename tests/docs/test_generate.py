"""The generated parts of the pages are those of today's program."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from docs.generate import PAGES, _prose, refreshed, run_examples
from eventlm.events import DECISIONS, FACTS, MARKERS
from tests.docs.pages import name

ALL_PAGES = sorted(PAGES.glob("*.md"))
REMEDY = "run `python -m docs.generate`"
PAGES_WITH_EXAMPLES = [page for page in ALL_PAGES if "```console" in page.read_text()]
#: Blocks that take a quarter of a minute of a processor, and on which none after them depends.
LONG_BLOCK = re.compile(r"^```console\n\$ eventlm replay [^`]*--policy \S+ --policy .*?^```\n", re.S | re.M)


@pytest.mark.parametrize("page", ALL_PAGES, ids=name)
def test_reference_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert text == refreshed(text), REMEDY


@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES, ids=name)
def test_console_examples_print_what_the_page_shows(page: Path) -> None:
    text = LONG_BLOCK.sub("", page.read_text())
    assert text == run_examples(text), REMEDY


@pytest.mark.soak
@pytest.mark.parametrize(
    "page", [page for page in PAGES_WITH_EXAMPLES if LONG_BLOCK.search(page.read_text())], ids=name
)
def test_long_console_examples_print_what_the_page_shows(page: Path) -> None:
    text = page.read_text()
    assert text == run_examples(text), REMEDY


def test_every_decoder_of_transformers_is_computed_or_refused_with_a_reason() -> None:
    """By the table that `tests/models/decoders.py` has found, which is of one version."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = msgspec.json.decode((PAGES / "decoders.json").read_bytes())
    models = found["models"]
    if found["transformers"] == transformers.__version__:
        assert models.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert not [name for name, paths in models.items() if any("\n" in reason for reason in paths.values())]
    num_others = sum(not paths["transformers"] and paths["torch"] != "" for paths in models.values())
    assert num_others >= 40
    assert f"; {num_others} others [through transformers]" in (PAGES.parent / "README.md").read_text()
    assert f"- {num_others} other decoders [through transformers]" in (PAGES.parent / "CHANGELOG.md").read_text()


def test_every_field_of_every_event_is_described() -> None:
    text = (PAGES / "trace-format.md").read_text()
    for kind in (*FACTS, *DECISIONS, *MARKERS):
        heading = f"### `{kind.__struct_config__.tag}`\n"
        assert heading in text
        section = text.partition(heading)[2].partition("\n### ")[0]
        own = {field.name for field in msgspec.structs.fields(kind)} - {"s", "ts", "c", "p"}
        assert own == set(re.findall(r"^\| `(\w+)` \|", section, re.M))


def test_every_row_has_a_meaning() -> None:
    text = (PAGES / "trace-format.md").read_text()
    assert [line for line in text.splitlines() if re.search(r"\| +\|$", line)] == []


def test_a_field_that_changes_would_be_noticed() -> None:
    text = (PAGES / "trace-format.md").read_text()
    without = re.sub(r"^\| `prompt_tokens` .*\n", "", text, count=1, flags=re.M)
    changed = text.replace("| `n` | integer | `1` |", "| `n` | integer | `2` |")
    assert without != text != changed
    assert refreshed(without) != without
    assert refreshed(changed) == text


def test_indented_lines_of_a_help_text_stay_as_they_are() -> None:
    assert list(_prose("One\nparagraph, and\n  its end.")) == ["One paragraph, and its end."]
    assert list(_prose("  a    b\n       c")) == ["```text\na    b\n     c\n```"]
    assert list(_prose("A file:\n  [x]\n  y = 1\n")) == ["A file:", "```text\n[x]\ny = 1\n```"]
