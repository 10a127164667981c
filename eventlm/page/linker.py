"""Joins ES modules into one script, without a build step.

A module imports `./name.js` from any of the folders that it is linked with, or a vendored library by its name. Each
module becomes a function that runs once, in the order of imports, and returns what it exports. Of the syntax of
modules, only what pages need is known: imports by name, the default import of a library, and exported declarations.
"""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable

from eventlm.page.vendored import LIBRARIES, read_vendored

STATIC = resources.files(__package__) / "static"
#: Style sheets of the components, in the order in which later ones override earlier ones.
_STYLE_SHEETS = ("theme.css", "components.css", "timeline.css")

_IMPORT = re.compile(r'^import\s*(?:\{(?P<names>[^}]*)\}|(?P<default>\w+))\s*from\s*"(?P<source>[^"]+)";\n?', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) (?P<name>\w+))", re.M)
_EXPORT_LIST = re.compile(r"\bexport\s*\{(?P<names>[^}]*)\};?\s*$")
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*\n?", re.M)
#: What would end the script inside HTML.
_ENDS_SCRIPT = re.compile(r"</script|<!--", re.I)


class LinkError(ValueError):
    """Modules that cannot be joined: one is missing, they import in a circle, or one lacks what another imports."""


def link(entry: str, *folders: Traversable) -> str:
    """One script of the module `entry` and of all that it imports, for a browser to run as a classic script.

    folders: where modules are looked for, before those of this package. Raises LinkError.
    """
    linker = _Linker((*folders, STATIC))
    linker.add(f"./{entry}", ())
    return linker.text()


def link_styles(*folders: Traversable) -> str:
    """One style sheet: that of the libraries, those of the components, then all in `folders`, by name."""
    sheets = [read_vendored(library.style_sheet) for library in LIBRARIES.values() if library.style_sheet]
    sheets += [(STATIC / name).read_text("utf-8") for name in _STYLE_SHEETS]
    for folder in folders:
        own = sorted((each for each in folder.iterdir() if each.name.endswith(".css")), key=lambda each: each.name)
        sheets += [each.read_text("utf-8") for each in own]
    return "\n".join(sheets)


class _Linker:
    def __init__(self, folders: tuple[Traversable, ...]) -> None:
        self._folders = folders
        #: The text of each module by its source, in the order in which they run.
        self._texts: dict[str, str] = {}
        self._exports: dict[str, dict[str, str]] = {}
        self._variables: dict[str, str] = {}

    def text(self) -> str:
        licences = dict.fromkeys(LIBRARIES[source].licence_file for source in self._texts if source in LIBRARIES)
        notes = [f"/*\n{file}\n{read_vendored(file).strip()}\n*/\n" for file in licences]
        return "".join([*notes, *self._texts.values()])

    def add(self, source: str, importers: tuple[str, ...]) -> None:
        """The module behind what it imports, unless it is there. importers: from the entry to who asks for it."""
        if source in self._texts:
            return
        if source in importers:
            circle = " → ".join(each.removeprefix("./") for each in (*importers[importers.index(source) :], source))
            raise LinkError(f"modules import each other in a circle: {circle}")
        library = LIBRARIES.get(source)
        text = read_vendored(library.script) if library else self._read(source, importers)
        if _ENDS_SCRIPT.search(text):
            raise LinkError(f"{source}: a script in HTML may contain neither </script nor <!--")

        def imported(found: re.Match[str]) -> str:
            self.add(found["source"], (*importers, source))
            return self._import_line(found, source)

        exports: dict[str, str] = {}

        def exported(found: re.Match[str]) -> str:
            exports.update(_pairs(found["names"]))
            return ""

        body = _IMPORT.sub(imported, _SOURCE_MAP.sub("", text))
        if library:
            body = _EXPORT_LIST.sub(exported, body)
            exports = {outer: inner for inner, outer in exports.items()}
            if library.default_export:
                exports["default"] = library.default_export
        else:
            exports = {found["name"]: found["name"] for found in _EXPORT.finditer(body)}
            body = _EXPORT.sub("", body)
        if unknown := re.search(r"^(?:import|export)\b.*", body, re.M):
            raise LinkError(f"{source}: this form of import or export is not supported: {unknown[0]}")
        self._exports[source] = exports
        self._variables[source] = f"$module{len(self._variables)}"
        members = ", ".join(f"{outer}: {inner}" if outer != inner else outer for outer, inner in exports.items())
        self._texts[source] = (
            f'/* {source.removeprefix("./")} */\nconst {self._variables[source]} = (() => {{\n"use strict";\n'
            f"{body.rstrip()}\nreturn {{ {members} }};\n}})();\n"
        )

    def _read(self, source: str, importers: tuple[str, ...]) -> str:
        who = importers[-1].removeprefix("./") if importers else "the page"
        if not re.fullmatch(r"\./\w+\.js", source):
            raise LinkError(f'{who} imports "{source}", which is neither ./NAME.js nor one of {", ".join(LIBRARIES)}')
        found = [path for folder in self._folders if (path := folder / source[2:]).is_file()]
        if not found:
            raise LinkError(f"{who} imports {source}, which does not exist in {', '.join(map(str, self._folders))}")
        if len(found) > 1:
            raise LinkError(f"{who} imports {source}, which exists more than once: {', '.join(map(str, found))}")
        return found[0].read_text("utf-8")

    def _import_line(self, found: re.Match[str], importer: str) -> str:
        source = found["source"]
        # A default import is one of the name `default`.
        names = {"default": found["default"]} if found["default"] else _pairs(found["names"])
        for name in names:
            if name not in self._exports[source]:
                raise LinkError(f"{importer.removeprefix('./')} imports {name} from {source}, which does not export it")
        members = ", ".join(f"{outer}: {inner}" if outer != inner else outer for outer, inner in names.items())
        return f"const {{ {members} }} = {self._variables[source]};\n"


def _pairs(names: str) -> dict[str, str]:
    """`a, b as c` as `{a: a, b: c}`."""
    pairs = {}
    for each in filter(None, (part.strip() for part in names.split(","))):
        first, _, second = each.partition(" as ")
        pairs[first.strip()] = second.strip() or first.strip()
    return pairs
