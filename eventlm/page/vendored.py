"""The libraries of others that pages contain, each pinned by its hash.

To take another version, copy the files from the package of the npm registry and write their hashes here.
"""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

_FOLDER = resources.files(__package__) / "vendor"


class Library(NamedTuple):
    """A library as npm has it.

    script, licence_file, style_sheet: files in `vendor/`; the last may be "".
    default_export: the variable that a script without exports sets, or "".
    """

    version: str
    script: str
    licence_file: str
    style_sheet: str = ""
    default_export: str = ""


#: By the name under which modules import them.
LIBRARIES = {
    "preact": Library("11.2.0", "preact.mjs", "preact.LICENSE"),
    "preact/hooks": Library("11.2.0", "preact_hooks.mjs", "preact.LICENSE"),
    "uplot": Library("1.6.32", "uplot.iife.min.js", "uplot.LICENSE", "uplot.min.css", default_export="uPlot"),
}
SHA256 = {
    "preact.LICENSE": "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    "preact.mjs": "bdcbd9abdf2c77c5c45326eab42191e949222d479d0d5f69467387a77040cb55",
    "preact_hooks.mjs": "e862ab2973aa6455eaa0f77c5d832d2157d6be59a17c8ba546550a575b58c6b4",
    "uplot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uplot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def read_vendored(file: str) -> str:
    """The text of a file in `vendor/`."""
    return (_FOLDER / file).read_text("utf-8")
