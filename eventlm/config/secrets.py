"""What is shown in place of a secret, wherever a configuration is printed, recorded or quoted in a message."""

from __future__ import annotations

import re

#: What stands for a secret.
REDACTED = "***"

#: Keys of a spec whose values may be secret: also those that a slip may have made of `key`.
_SECRET_KEY = re.compile(r"(?!key_(env|file)$).*(key|secret|password|auth).*", re.I)
_USER = re.compile(r"(//)[^/,@]*@")
_NUMBER = re.compile(r"[0-9.]+")
_WORD = re.compile(r"[A-Za-z_]+")


def hide(value: object) -> str:
    """A value that is secret as a whole; empty if it is not set."""
    return REDACTED if value else ""


def hide_keys(text: str) -> str:
    """A backend's spec, or a replicaset's, without its keys: `http://10.0.0.2:8000,key=***`."""
    first, *parts = _USER.sub(rf"\1{REDACTED}@", text).split(",")
    if "?" in first:
        first = f"{first[: first.index('?')]}?{REDACTED}"
    elif "=" in first:
        start = first.rfind(":", 0, first.index("=")) + 1
        first = first[:start] + _hide_part(first[start:])
    return ",".join([first, *map(_hide_part, parts)])


def hide_keys_of(value: object) -> object:
    """The same of a list of specs, as an option has them."""
    if isinstance(value, list):
        return [hide_keys_of(each) for each in value]
    return hide_keys(value) if isinstance(value, str) else REDACTED


def _hide_part(part: str) -> str:
    key, equals, value = part.partition("=")
    if not equals or not _WORD.fullmatch(key.strip()) or (value and not value.strip("=")):
        # A secret without `key=`, which may end with the `=` of base64. Numbers are those of a list.
        return part if _NUMBER.fullmatch(part.strip()) or not part.strip() else REDACTED
    return f"{key}={REDACTED}" if value and _SECRET_KEY.fullmatch(key.strip()) else part
