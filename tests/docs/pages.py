"""The Markdown pages of the repository, and what is in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/**/*.md", "examples/**/*.md", "kernels/**/*.md", "eventlm/**/*.md")
    for path in REPOSITORY.glob(pattern)
)

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.S | re.M)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
#: Languages of blocks with commands for a shell.
_SHELL = ("", "sh", "bash", "console")
#: A command of a console, which may go on in the next line.
_TYPED = re.compile(r"^\$ (?:[^\n]*\\\n)*[^\n]*", re.M)
#: What ends one command of a line and begins the next.
_BETWEEN = {"|", "||", "&&", "&", ";"}


class Command(NamedTuple):
    """A command of a page: its words, without the assignments before it and the redirections after it."""

    page: str
    words: list[str]


def name(page: Path) -> str:
    """A page's path, for the names of tests."""
    return str(page.relative_to(REPOSITORY))


def without_fences(text: str) -> str:
    """The prose of a page."""
    return _FENCE.sub("", text)


def inline_code(text: str) -> list[str]:
    """What stands between backticks in a page's prose."""
    return _INLINE.findall(without_fences(text))


def commands(page: Path) -> list[Command]:
    """Every command in the page's blocks for a shell."""
    found = []
    for fence in _shell_fences(page):
        joined = re.sub(r"\\\n *", "", fence["text"])
        for line in joined.splitlines():
            if fence["language"] == "console" and not line.startswith("$ "):
                continue
            found += [Command(name(page), words) for words in split_line(line.removeprefix("$ ")) if words]
    return found


def shell_blocks(page: Path) -> list[str]:
    """The text of the page's blocks for a shell, without the output of examples."""
    return [
        "\n".join(_TYPED.findall(fence["text"])) if fence["language"] == "console" else fence["text"]
        for fence in _shell_fences(page)
    ]


def _shell_fences(page: Path) -> list[re.Match[str]]:
    return [fence for fence in _FENCE.finditer(page.read_text()) if fence["language"] in _SHELL]


def split_line(line: str) -> list[list[str]]:
    """The commands of a shell's line. Text that is no command, such as JSON over several lines, gives none."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        return []
    parts: list[list[str]] = [[]]
    skip = False
    for word in words:
        if word in _BETWEEN:
            parts.append([])
        elif word in (">", ">>", "<", "2>"):
            skip = True
        elif skip:
            skip = False
        else:
            parts[-1].append(word)
    return [_without_assignments(part) for part in parts]


def _without_assignments(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def program_words(words: list[str]) -> list[str] | None:
    """The arguments of a call of `eventlm`; None for another program."""
    if words and (words[0] == "eventlm" or words[0].endswith("/bin/eventlm")):
        return words[1:]
    return None


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_fences(text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found
