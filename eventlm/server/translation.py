"""Parts of translations from other APIs to requests: names of fields in errors, limits that are no errors there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from msgspec import structs

from eventlm.engine.request import Request
from eventlm.errors import InputError

#: In place of a top-p of 0, which keeps the most likely token alone where it is allowed.
SMALLEST_TOP_P = 1e-9


@contextmanager
def native_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Raise errors with the caller's own names of fields. names: by the beginning of their paths here."""
    try:
        yield
    except InputError as error:
        if (param := _renamed(error.param or "", names)) == (error.param or ""):
            raise
        message = str(error).replace(f"'{error.param}'", f"'{param}'").replace(f": {error.param} ", f": {param} ")
        named = InputError(param, message)
        named.code = error.code
        raise named from error


def _renamed(param: str, names: Mapping[str, str]) -> str:
    """The path with its beginning renamed, the longest one that has another name."""
    for start in sorted(names, key=len, reverse=True):
        rest = param.removeprefix(start)
        if param.startswith(start) and rest[:1] in ("", ".", "["):
            return names[start] + rest
    return param


def limited(request: Request, max_tokens: int | None) -> Request:
    """A request for as many tokens as the context holds, cut to `max_tokens` if that is less; None: no limit."""
    if max_tokens is None or max_tokens >= request.max_tokens:
        return request
    return structs.replace(request, sampling=structs.replace(request.sampling, max_tokens=max_tokens))
