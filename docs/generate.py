"""Bring the generated parts of these pages up to date: reference tables, and the output of console examples.

`python -m docs.generate` rewrites them, and a test checks that nothing is left to rewrite. A page marks each generated
part with `<!-- generated: NAME -->` and `<!-- end -->`. In the tables of events the last column is written by hand: it
is kept, and a new field gets an empty one, which the test refuses. In a console block each line that begins with `$ `
is run, in a folder that has the files of `examples/bug_hunt`, and what follows it is its output.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, UNSET, Raw, UnsetType

from eventlm.cli.main import COMMANDS, _parser
from eventlm.config.options import options, sections
from eventlm.config.plugin_spec import format_plugin_spec, format_value
from eventlm.errors import ExitCode
from eventlm.events import DECISIONS, FACTS, MARKERS, Event
from eventlm.models.families import FAMILIES, MULTIMODAL
from eventlm.models.gguf.config_json import ARCHITECTURES
from eventlm.models.gguf.header import TENSOR_TYPES
from eventlm.models.gguf.tokenizer_json import SPLITS
from eventlm.server.app import ALL_REFUSED_PATHS, ENDPOINTS
from eventlm.server.endpoints.openapi import Endpoint, openapi_path, unless

PAGES = Path(__file__).parent
REPOSITORY = PAGES.parent
#: The files that console examples work on.
CONSOLE_FILES = REPOSITORY / "examples" / "bug_hunt"

#: What the output of an example says that differs between runs and machines, and what stands for it.
VARYING = (
    (re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}"), "20260101-120000-000000"),
    (re.compile(r'"h":"[0-9a-f]{16}"'), '"h":"0123456789abcdef"'),
    (re.compile(r"simulated in [\d.,]+ s, [\d.,]+ times as fast"), "simulated in 1.0 s, 43 times as fast"),
    (re.compile(r"[\d,]+ steps/s here"), "3,200 steps/s here"),
    # A trace begins with what it was recorded on.
    (re.compile(r"events, [\d,]+ bytes"), "events, 3,926,881 bytes"),
)

_GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.S)
_CONSOLE = re.compile(r"(```console\n)(.*?)(```\n)", re.S)
_ROW = re.compile(r"^\| `(\w+)` \|.*\| (.*?) \|$")
_SECTION_OF_OPTIONS = re.compile(
    r"\(\[[\w.]+\] in the TOML file\)$|^Service classes|^Replicasets|^Rules of models|^configuration$|^engine \(as of"
)


def main() -> int:
    """Rewrite the pages that are named, or all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__.split("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, default=sorted(PAGES.glob("*.md")))
    for page in parser.parse_args().pages:
        text = page.read_text()
        fresh = refreshed(run_examples(text) if "```console" in text else text)
        if fresh != text:
            page.write_text(fresh)
            print(f"wrote {page}")
    return 0


def refreshed(text: str) -> str:
    """A page's text with the generated parts as they must be today."""
    return _GENERATED.sub(lambda found: found[1] + "\n" + PARTS[found[2]](found[0]).strip() + "\n\n" + found[3], text)


def run_examples(text: str) -> str:
    """A page's text with the output that its console examples have today. They run one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        # A reader who has followed the page in the repository has left a workload and runs there.
        shutil.copytree(CONSOLE_FILES, work, ignore=shutil.ignore_patterns("runs", "load.jsonl", "__pycache__"))
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "EVENTLM_STATE": f"{folder}/state",
            "EVENTLM_HOME": f"{folder}/home",
            "COLUMNS": "100",
        }

        def run(found: re.Match[str]) -> str:
            return found[1] + "".join(_transcript(found[2], work, environment)) + found[3]

        return _CONSOLE.sub(run, text)


def commands_of(block: str) -> list[str]:
    """The commands of a console block, lines that end with a backslash joined."""
    joined = re.sub(r"\\\n>? *", "", block)
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def _transcript(block: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Each command as it is written, then its output."""
    for written in re.findall(r"^\$ (?:.*\\\n)*.*\n", block, re.M):
        [command] = commands_of(written)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        output = done.stdout
        for varying, constant in VARYING:
            output = varying.sub(constant, output)
        yield written
        yield "".join(f"{line.rstrip()}\n" for line in output.splitlines())


# ---- Events ----


def _events(kinds: tuple[type[Event], ...], old: str) -> str:
    parts = []
    nested: dict[str, type] = {}
    for kind in sorted(kinds, key=lambda each: str(each.__struct_config__.tag)):
        parts += [f"### `{kind.__struct_config__.tag}`", *_struct(kind, old, nested)]
    shown: set[str] = set()
    while more := sorted(nested.keys() - shown):
        shown.add(more[0])
        parts += [f"### {more[0]}", *_struct(nested[more[0]], old, nested)]
    return "\n\n".join(parts)


def _struct(struct: type, old: str, nested: dict[str, type]) -> Iterator[str]:
    """The first paragraph of a struct's docstring and a table of its own fields."""
    yield " ".join((struct.__doc__ or "").split("\n\n")[0].split())
    common = {field.name for field in msgspec.structs.fields(Event)} if issubclass(struct, Event) else set()
    fields = [field for field in msgspec.structs.fields(struct) if field.name not in common | {"p"}]
    if not fields:
        yield "It has no fields of its own."
        return
    meanings = _meanings(old, struct)
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        kind = _type_in_words(field.type, nested)
        rows.append(f"| `{field.name}` | {kind} | {_default(field)} | {meanings.get(field.name, '')} |")
    yield "\n".join(rows)


def _meanings(old: str, struct: type) -> dict[str, str]:
    """The last column of the struct's table as the page has it."""
    tag = struct.__struct_config__.tag if issubclass(struct, Event) else None
    heading = f"### `{tag}`" if tag else f"### {struct.__name__}"
    section = old.partition(f"{heading}\n")[2].partition("\n### ")[0]
    return {row[1]: row[2].strip() for line in section.splitlines() if (row := _ROW.match(line))}


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not NODEFAULT:
        value = field.default
    elif field.default_factory is not NODEFAULT:
        value = field.default_factory()
    else:
        return "required"
    if value is UNSET:
        return "left out"
    return f"`{msgspec.json.encode(value).decode()}`"


def _type_in_words(kind: Any, nested: dict[str, type]) -> str:
    """A type as JSON has it; structs in it are put into `nested`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_in_words(arguments[0], nested)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_in_words(each, nested) for each in arguments if each is not UnsetType)
    if origin is list:
        return f"array of {_type_in_words(arguments[0], nested)}"
    if origin is tuple:
        return "[" + ", ".join(_type_in_words(each, nested) for each in arguments) + "]"
    if origin is dict:
        return f"object of {_type_in_words(arguments[1], nested)}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        nested[kind.__name__] = kind
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return {int: "integer", str: "string", bool: "boolean", type(None): "null", Raw: "object", Any: "any"}[kind]


# ---- Options and commands ----


def _options(_: str) -> str:
    parts = []
    for section, title in sections().items():
        rows = ["| key | flag | default | meaning |", "|---|---|---|---|"]
        for option in options().values():
            if option.section == section:
                default = format_plugin_spec(option.default) if option.plugin_kind else option.default
                shown = f"`{format_value(default)}`" if default not in ("", [], {}) else ""
                description = _cell(option.description)
                if option.choices:
                    description += f" ({', '.join(f'`{choice}`' for choice in option.choices)})"
                rows.append(f"| `{option.name}` | `{option.flag}` | {shown} | {description} |")
        parts += [f"### `[{section}]`: {title}", "\n".join(rows)]
    return "\n\n".join(parts)


def _exit_codes(_: str) -> str:
    return "\n".join(["| code | meaning |", "|---|---|", *(f"| {code.value} | {code.meaning} |" for code in ExitCode)])


def _commands(_: str) -> str:
    return "\n\n".join(part for name in COMMANDS for part in _command(_subparser(_parser(name), name)))


def _subparser(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    return subparsers_of(parser)[name]


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands by name; none if it has no commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {parser.prog}"
    for paragraph in (parser.description or "").split("\n\n"):
        yield from _prose(paragraph)
    subparsers = subparsers_of(parser)
    if parser.usage and not subparsers:
        yield f"```text\n{parser.usage % {'prog': parser.prog}}\n```"
    rows = ["| argument | meaning |", "|---|---|"]
    has_options = False
    for group in parser._action_groups:
        if _SECTION_OF_OPTIONS.search(group.title or ""):
            has_options = True
            continue
        for action in group._group_actions:
            if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
                continue
            help_text = (action.help or "").replace("%%", "%")
            if "%(default)s" in help_text:
                help_text = help_text % {"default": action.default}
            rows.append(f"| `{_argument(action)}` | {_cell(help_text)} |")
    if len(rows) > 2:
        yield "\n".join(rows)
    if has_options:
        yield "It also takes [the options of the configuration](configuration.md#options) as flags."
    for paragraph in (parser.epilog or "").split("\n\n"):
        if not paragraph.startswith("exit codes:"):
            yield from _prose(paragraph.removeprefix("examples:\n"))
    for subparser in subparsers.values():
        yield from _command(subparser)


def _prose(paragraph: str) -> Iterator[str]:
    """A paragraph of a help text. Indented lines at its start or after a colon, such as examples, stay as they are."""
    found = re.match(r"((?:\S.*:\n)?)((?:  .*(?:\n|\Z))+)\Z", paragraph.rstrip())
    text, verbatim = found.groups() if found else (paragraph, "")
    if text:
        yield " ".join(text.split())
    if verbatim:
        yield f"```text\n{textwrap.dedent(verbatim)}\n```"


def _argument(action: argparse.Action) -> str:
    """A flag or a positional argument with its value: `--slo LIMITS`."""
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    value = " ".join(value) if isinstance(value, tuple) else str(value)
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def _models(_: str) -> str:
    """A row for each architecture, with the docstring of the function that makes its `ModelSpec`."""
    rows = ["| architecture | models | what it is |", "|---|---|---|"]
    for name, family in FAMILIES.items():
        rows.append(f"| `{name}` | {family.models} | {_cell(family.make.__doc__ or '')} |")
    for name, multimodal in MULTIMODAL.items():
        decoders = " or ".join(f"`{decoder}`" for decoder in multimodal.decoders.values())
        rows.append(f"| `{name}` | {multimodal.models} | with the decoder of {decoders} |")
    return "\n".join(rows)


def _decoders(_: str) -> str:
    """What transformers can make, and why some of it is refused, as `tests/models/decoders.py` has found it."""
    found = msgspec.json.decode((PAGES / "decoders.json").read_bytes())
    rows = [
        f"With transformers {found['transformers']}:",
        "",
        "| `model_type` | architecture | torch | compiled | transformers |",
        "|---|---|---|---|---|",
    ]
    for model_type, model in found["models"].items():
        ours = ("yes" if not model[path] else "no" for path in ("torch", "compiled"))
        theirs = model["transformers"].partition(": ")[0]
        cells = (f"`{model_type}`", f"`{model['architecture']}`", *ours, _cell(theirs) if theirs else "yes")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _gguf(_: str) -> str:
    """What of GGUF files can be run."""
    rows = {
        "types of tensors": ", ".join(TENSOR_TYPES),
        "architectures": ", ".join(ARCHITECTURES),
        "tokenizers": f"`llama` (SentencePiece), `gemma4`, and `gpt2` with one of these splits: {', '.join(SPLITS)}",
    }
    return "\n".join(["| | can be run |", "|---|---|", *(f"| {name} | {cell} |" for name, cell in rows.items())])


# ---- Endpoints ----


def _endpoints(_: str) -> str:
    return "\n\n".join(part for endpoint in ENDPOINTS for part in _endpoint(endpoint))


def _endpoint(endpoint: Endpoint) -> Iterator[str]:
    """What an endpoint does, and what becomes of each parameter."""
    yield f"## `{endpoint.method} {openapi_path(endpoint.path)}`"
    yield " ".join((inspect.getdoc(endpoint.handler) or "").split())
    rest = endpoint.ignored.keys() | endpoint.refused.keys()
    parameters = {
        "header": [f"`{each.name}`" for each in endpoint.all_parameters if each.location == "header"],
        "query": [f"`{each.name}`" for each in endpoint.all_parameters if each.location == "query"],
        "honoured": [f"`{name}`" for name in endpoint.only or _names(endpoint.body) if name not in rest],
        "ignored": _ignored(endpoint),
        "refused": [f"`{name}`{unless(neutral)}" for name, neutral in endpoint.refused.items()],
    }
    rows = [f"| {fate} | {_cell(', '.join(names))} |" for fate, names in parameters.items() if names]
    if rows:
        yield "\n".join(["| | parameters |", "|---|---|", *rows])


def _refused_paths(_: str) -> str:
    """Paths that other servers have, each with what to do instead."""
    rows = []
    for each in ALL_REFUSED_PATHS:
        path = each.path.replace("|", r"\|")
        rows.append(f"| `{path}` | {_cell(each.why)} |")
    return "\n".join(["| path | |", "|---|---|", *rows])


def _ignored(endpoint: Endpoint) -> list[str]:
    if endpoint.only:
        return ["all others"]
    return [f"`{name}` ({reason})" for name, reason in endpoint.ignored.items()]


def _names(body: Any) -> Iterator[str]:
    """The names of a body's fields, without those of a second form that the first has."""
    forms = body if isinstance(body, tuple) else (body,)
    fields = [field.encode_name for form in forms if form is not None for field in msgspec.structs.fields(form)]
    return iter(dict.fromkeys(fields))


def _cell(text: str) -> str:
    """Text for a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


PARTS: dict[str, Callable[[str], str]] = {
    "facts": lambda old: _events(FACTS, old),
    "decisions": lambda old: _events(DECISIONS, old),
    "markers": lambda old: _events(MARKERS, old),
    "options": _options,
    "commands": _commands,
    "models": _models,
    "decoders": _decoders,
    "endpoints": _endpoints,
    "refused_paths": _refused_paths,
    "gguf": _gguf,
    "exit_codes": _exit_codes,
}

if __name__ == "__main__":
    sys.exit(main())
