"""Pages name files, anchors, commands, flags, options and metrics that exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from docs.generate import subparsers_of
from eventlm.cli.config_flags import config_from_arguments
from eventlm.cli.main import _parser
from eventlm.cli.parser import Parser
from eventlm.errors import UsageError
from tests.docs.pages import (
    PAGES,
    REPOSITORY,
    Command,
    anchors,
    commands,
    inline_code,
    name,
    program_words,
    shell_blocks,
    split_line,
    without_fences,
)

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
#: Folders of the repository: code in backticks that begins with one is a path.
_ROOTS = ("benchmarks/", "docs/", "eventlm/", "examples/", "kernels/", "policies/", "replay/", "tests/")
#: A loop of a shell, in one line or with `do` on the next.
_LOOP = re.compile(r"^ *(?:until|while) [^\n]*(?:;|\n) *do\b", re.M)
#: What only a user has.
_INVENTED = {"my_package.shortest:Shortest"}
#: Flags of vLLM, SGLang and llama.cpp.
_OF_BACKENDS = {
    "--embeddings", "--enable-auto-tool-choice", "--enable-metrics", "--metrics", "--reasoning-parser",
    "--tool-call-parser",
}  # fmt: skip
COMMANDS = [command for page in PAGES for command in commands(page)]


def parse(arguments: list[str]) -> None:
    """Parse as the program does; raises UsageError. Options of the configuration are checked too."""
    try:
        parsed = _parser(arguments[0]).parse_args(arguments)
    except SystemExit:
        return  # --help and --version
    assert hasattr(parsed, "run")
    if hasattr(parsed, "print_config"):
        parsed.config = None
        config_from_arguments(parsed)


def test_there_is_something_to_check() -> None:
    assert {"README.md", "docs/http-api.md", "docs/scheduling-bug.md"} <= {name(page) for page in PAGES}
    assert sum(program_words(command.words) is not None for command in COMMANDS) > 30


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in _LINK.findall(without_fences(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_in_backticks_exist(page: Path) -> None:
    for code in inline_code(page.read_text()):
        for word in code.split():
            if word.startswith(_ROOTS) and not re.search(r"[*<>{}:]|\.\.\.", word):
                assert (REPOSITORY / word).exists() or (page.parent / word).exists(), word


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if program_words(command.words) is not None],
    ids=lambda command: f"{command.page}: {' '.join(command.words)}"[:90],
)
def test_commands_of_blocks_parse(command: Command) -> None:
    arguments = program_words(command.words)
    assert arguments
    parse(arguments)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_the_text_have_the_flags_that_they_name(page: Path) -> None:
    for code in inline_code(page.read_text()):
        for words in split_line(code):
            arguments = program_words(words)
            if arguments and arguments[0][:1].islower():
                parser = _parser(arguments[0])
                for word in arguments:
                    parser = subparsers_of(parser).get(word, parser)  # type: ignore[assignment]
                assert parser.prog != "eventlm", code
                for word in arguments:
                    if word.startswith("--"):
                        assert word.partition("=")[0] in parser._option_string_actions, code


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_in_the_text_exist(page: Path) -> None:
    """Of some command, of a benchmark or of a tool that the page is about."""
    known = flags_of_the_program() | flags_of_the_benchmarks()
    others = {"--init", "--stop-timeout", "--build-arg", "--hypothesis-seed"} | _OF_BACKENDS
    for code in inline_code(page.read_text()):
        if code.startswith("--"):
            flag = re.split(r"[ =,]", code)[0]
            assert flag in known | others, code


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if len(command.words) > 1 and command.words[0].endswith("python")],
    ids=lambda command: f"{command.page}: {' '.join(command.words)}"[:90],
)
def test_scripts_exist_and_have_the_flags(command: Command) -> None:
    script = command.words[1]
    if script.startswith("-"):
        return
    [file] = [folder / script for folder in script_folders() if (folder / script).exists()]
    text = file.read_text()
    for word in command.words[2:]:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in text, word


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_command_waits_for_ever(page: Path) -> None:
    """A server that does not start ends what waits for it: `curl --retry`, not a loop."""
    assert not _LOOP.search(page.read_text())


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no checkout")
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_git_ignores_what_commands_write(page: Path) -> None:
    """A reader who follows a page in a checkout leaves nothing there that git sees. Capitals are placeholders."""
    for text in shell_blocks(page):
        # What is quoted is no redirection.
        unquoted = re.sub(r"'[^'\n]*'", "''", text)
        for target in re.findall(r"(?:--plot|--output|-o|--record|>) ([\w./-]+)", unquoted):
            if target.startswith("/") or target.split(".")[0].isupper():
                continue
            file = target if "." in Path(target).name else f"{target}/file"
            found = [(folder / file).resolve() for folder in script_folders()]
            places = [place for place in found if place.is_relative_to(REPOSITORY.resolve())]
            done = subprocess.run(["git", "check-ignore", *places], cwd=REPOSITORY, check=False, capture_output=True)
            assert done.returncode == 0, target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_metrics_exist(page: Path) -> None:
    known = metrics_of_the_program()
    for metric in re.findall(r"\b((?:vllm|eventlm):[a-z0-9_]+)", page.read_text()):
        short = re.sub(r"_(total|bucket|sum|count)$", "", metric)
        assert {metric, short} & known, metric


def test_wrong_pages_would_be_found() -> None:
    with pytest.raises(UsageError):
        parse(["serve", "--no-such-flag"])
    with pytest.raises(UsageError):
        parse(["serve", "--port", "many"])
    assert anchors("# One `two`: three\n## `[x]`: y z\n") == {"one-two-three", "x-y-z"}
    assert _LOOP.search("x\nuntil curl -sf localhost; do sleep 1; done")
    assert _LOOP.search("while true\n  do sleep 1\ndone")
    assert _LOOP.search("    while true;\n    do\n")
    assert not _LOOP.search("until it is\nready, do this")
    assert split_line("A=1 eventlm serve > log & curl x | jq .a") == [["eventlm", "serve"], ["curl", "x"], ["jq", ".a"]]


def script_folders() -> tuple[Path, ...]:
    """Where the pages' commands are run."""
    return (REPOSITORY, REPOSITORY / "examples", REPOSITORY / "examples" / "bug_hunt")


@cache
def metrics_of_the_program() -> set[str]:
    """Every metric that the source names."""
    source = "".join(path.read_text() for path in (REPOSITORY / "eventlm").rglob("*.py"))
    return set(re.findall(r'"((?:vllm|eventlm):[a-z0-9_]+)"', source))


@cache
def flags_of_the_program() -> set[str]:
    """Every flag of every command."""
    from eventlm.cli.main import COMMANDS as NAMES

    found: set[str] = set()
    todo: list[Parser] = [subparsers_of(_parser(name))[name] for name in NAMES]  # type: ignore[misc]
    while todo:
        parser = todo.pop()
        found |= set(parser._option_string_actions)
        todo += subparsers_of(parser).values()  # type: ignore[arg-type]
    return found


@cache
def flags_of_the_benchmarks() -> set[str]:
    """Every flag that a benchmark's source names."""
    files = (REPOSITORY / "benchmarks").rglob("*.py")
    return {flag for file in files for flag in re.findall(r'"(--[a-z0-9-]+)"', file.read_text())}
