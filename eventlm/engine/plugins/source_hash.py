"""A hash of what a module's code does. A trace identifies its plug-ins by it.

Comments, docstrings and layout do not count: they may change without a recorded run drifting. Every version of Python
that reads the source must give the same, so the syntax tree is written in a form of our own: `ast.dump` writes the
fields that a version has added, and `ast.unparse` has changed how it writes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import xxhash

#: Fields that do not change what a node does: the spelling of a string, comments for type checkers, and whether a name
#: is read or written, which follows from its place.
_SILENT_FIELDS = frozenset({"kind", "type_comment", "type_ignores", "ctx"})


@functools.lru_cache(maxsize=64)
def source_hash(source: str) -> str:
    """16 hex digits for a module's source. Raises SyntaxError.

    Cached, because reading many traces, or one of many segments, hashes the same plug-ins each time.
    """
    return xxhash.xxh3_64_hexdigest("".join(_written(ast.parse(source))).encode())


def _written(part: object) -> Iterator[str]:
    """A node, a list, or a name. Empty fields are left out: new versions of Python add such fields to old nodes."""
    if isinstance(part, ast.Constant):
        # With its type: 1, 1.0 and True are equal. In ASCII: what `repr` escapes depends on the version of Unicode.
        yield f"{type(part.value).__name__} {part.value!a}"
    elif isinstance(part, ast.AST):
        yield f"{type(part).__name__}("
        for name in part._fields:
            field = getattr(part, name, None)
            if isinstance(part, ast.JoinedStr):
                # Some versions put an empty text into an f-string.
                field = [each for each in part.values if not (isinstance(each, ast.Constant) and each.value == "")]
            if name not in _SILENT_FIELDS and field is not None and field != []:
                yield f"{name}="
                yield from _written(_parts_that_act(field) if isinstance(field, list) else field)
                yield ","
        yield ")"
    elif isinstance(part, list):
        yield "["
        for each in part:
            yield from _written(each)
            yield ","
        yield "]"
    else:
        yield ascii(part)


def _parts_that_act(parts: list[object]) -> list[object]:
    """Without statements that do nothing, as docstrings (an attribute's too) and `pass`."""
    return [
        part
        for part in parts
        if not (isinstance(part, ast.Pass) or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)))
    ]
