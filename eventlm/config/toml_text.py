"""A configuration as TOML text that loads back to the same configuration."""

from __future__ import annotations

import json
import re

import msgspec

from eventlm.config.load import API_KEY_VARIABLE, REDACTED
from eventlm.config.options import CLASSES, options, sections
from eventlm.config.structs import Config

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(config: Config) -> str:
    """All options, each under its description. A secret that is set is not shown: it appears as a comment."""
    tables = msgspec.to_builtins(config)
    lines: list[str] = []
    for section, title in sections().items():
        lines += ["", f"# {title}", f"[{section}]"]
        for option in options().values():
            if option.section != section:
                continue
            value = tables[section][option.name]
            lines.append(f"# {option.description}")
            if option.is_secret and value:
                lines.append(f'# {option.name} = "{REDACTED}"  (set but not shown; give it in {API_KEY_VARIABLE})')
            else:
                lines.append(f"{option.name} = {_value(value)}")
    for name, table in tables[CLASSES].items():
        lines += ["", f"# Service class {name}", f"[{CLASSES}.{name}]"]
        lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines[1:]) + "\n"


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return repr(value)
        case str():
            return _string(value)
        case list():
            return "[" + ", ".join(map(_value, value)) + "]"
        case dict():
            pairs = ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items())
            return "{ " + pairs + " }" if pairs else "{}"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are a subset of TOML's; DEL is the one character that only TOML forbids as it stands.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
