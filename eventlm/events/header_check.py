"""Checks of the first line of a trace, before anything else is read. It may be forged, with correct hashes.

Limits of single fields are in their types, in `eventlm.config.core` and in `Header`; here is what types cannot express.
A writer checks its header by the same function, so no run is recorded that would be refused afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from eventlm.config.core import check_together
from eventlm.events.base import TIME_LIMIT_NS
from eventlm.events.codec import UNREADABLE, decode_body
from eventlm.events.markers import Header, PluginRecord
from eventlm.types import PluginKind

#: A few KiB are usual: configuration and plug-ins. It also bounds what is read of a file that is not a trace.
MAX_HEADER_BYTES = 1 << 20
#: Of nested tables and lists, because code that walks them is recursive.
MAX_DEPTH = 64
#: Positions are below this, so that every JSON reader reads them exactly.
_POSITION_LIMIT = 1 << 53
#: A message of msgspec: `Expected ... - at `$.core.num_blocks``.
_AT = re.compile(r"^(?P<what>.*) - at `\$\.(?P<where>.*)`$", re.S)


def decode_header(body: bytes) -> Header:
    """The header of a line's body. Raises ValueError, which names the field, if no engine can have written it."""
    if len(body) > MAX_HEADER_BYTES:
        raise ValueError(f"it has {len(body):,} bytes, and no header has more than {MAX_HEADER_BYTES:,}")
    try:
        header = decode_body(body)
    except UNREADABLE as error:
        found = _AT.match(str(error))
        raise ValueError(f"{found['where']}: {found['what']}" if found else str(error)) from error
    if not isinstance(header, Header):
        raise ValueError("it is another event")
    for problem in _problems(header):
        raise ValueError(problem)
    return header


def _problems(header: Header) -> Iterator[str]:
    for name, limit in (("s", _POSITION_LIMIT), ("ts", TIME_LIMIT_NS), ("c", _POSITION_LIMIT)):
        value = getattr(header, name)
        if not 0 <= value < limit:
            yield f"{name}: {value} is not from 0 to {limit - 1}"
    nested = {"config": header.config, "host": header.host}
    yield from _plugin_problems("", header.plugins, nested)
    others = header.replicasets or []
    for number, other in enumerate(others):
        nested[f"replicasets[{number}].host"] = other.host
        yield from _plugin_problems(f"replicasets[{number}].", other.plugins, nested)
    names = [each.name for each in header.sets]
    if len(set(names)) < len(names):
        yield "replicasets: two have one name"
    if others:
        try:
            check_together([each.core for each in header.sets])
        except ValueError as error:
            yield f"replicasets: {error}"
    for name, value in nested.items():
        if _is_deeper(value, MAX_DEPTH):
            yield f"{name}: tables and lists are nested more than {MAX_DEPTH} deep"


def _plugin_problems(where: str, plugins: list[PluginRecord], nested: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the plug-ins of a replicaset; their parameters are put into `nested`."""
    kinds = {record.kind for record in plugins}
    for kind in get_args(PluginKind):
        if kind not in kinds:
            yield f"{where}plugins: there is no {kind}"
    for index, record in enumerate(plugins):
        nested[f"{where}plugins[{index}].parameters"] = record.parameters
        if "type" in record.parameters:
            # That key is the plug-in's name.
            yield f"{where}plugins[{index}].parameters: none can be called `type`"


def _is_deeper(outermost: dict[str, Any], depth: int) -> bool:
    """Whether tables and lists are nested more than `depth` deep."""
    level: list[Any] = [outermost]
    for _ in range(depth):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True
