"""The libraries of others are those that npm has, and nothing is added or missing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from eventlm.page import vendored
from eventlm.page.vendored import LIBRARIES, SHA256, read_vendored

FOLDER = Path(vendored.__file__).parent / "vendor"
AXE = Path(__file__).parent / "vendor" / "axe.min.js"


def test_every_file_is_listed() -> None:
    assert {path.name for path in FOLDER.iterdir()} == SHA256.keys()
    needed = {
        file for each in LIBRARIES.values() for file in (each.script, each.licence_file, each.style_sheet) if file
    }
    assert needed == SHA256.keys()


@pytest.mark.parametrize("file", SHA256)
def test_every_file_is_the_pinned_one(file: str) -> None:
    assert hashlib.sha256((FOLDER / file).read_bytes()).hexdigest() == SHA256[file]
    assert read_vendored(file) == (FOLDER / file).read_text()


def test_axe_is_the_pinned_one() -> None:
    """axe-core 4.14.1, for tests only."""
    assert hashlib.sha256(AXE.read_bytes()).hexdigest() == (
        "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
    )


def test_licences_allow_it() -> None:
    for library in LIBRARIES.values():
        assert "The MIT License (MIT)" in read_vendored(library.licence_file)
