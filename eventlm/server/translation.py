"""Parts of translations from other APIs to requests: names of fields in errors, limits that are no errors there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

from msgspec import Meta, structs

from eventlm.engine.rate_limits import RateLimits
from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.sampling_params import LARGEST_REPETITION_PENALTY, SMALLEST_REPETITION_PENALTY
from eventlm.text.forwarding.bodies import with_max_tokens

#: In place of a top-p of 0, which keeps the most likely token alone where it is allowed.
SMALLEST_TOP_P = 1e-9
_LARGEST_TEMPERATURE = 2.0
#: One that may be empty.
StopText = Annotated[str, Meta(max_length=4096)]


def stop_strings(given: str | list[str] | None) -> list[str]:
    """Stop strings as a list, without empty ones."""
    return [text for text in ([given] if isinstance(given, str) else given or []) if text]


def bounded_temperature(given: float | None) -> float | None:
    """A temperature where there are no bounds; below 0 it is greedy."""
    return None if given is None else min(max(given, 0.0), _LARGEST_TEMPERATURE)


def bounded_repetition_penalty(given: float | None) -> float | None:
    """A repetition penalty where there are no bounds. 0 and below is none."""
    if given is None:
        return None
    return 1.0 if given <= 0 else min(max(given, SMALLEST_REPETITION_PENALTY), LARGEST_REPETITION_PENALTY)


#: Gives the path of a field its native name.
Rename = Callable[[str], str]


@contextmanager
def native_fields(names: Rename | Mapping[str, str]) -> Iterator[None]:
    """Raise errors with the caller's own names of fields. names: see `renaming`."""
    try:
        yield
    except InputError as error:
        raise error.renamed(renaming(names) if isinstance(names, Mapping) else names) from error


def renaming(names: Mapping[str, str]) -> Rename:
    """What gives a path its native name. names: by the beginning of paths here, a regular expression, the names there,
    which may refer to its groups. The first that matches counts.
    """

    def rename(path: str) -> str:
        for start, name in names.items():
            if found := re.match(rf"(?:{start})(?=$|[.\[])", path):
                return found.expand(name) + path[found.end() :]
        return path

    return rename


def limited(request: Request, max_tokens: int | None) -> Request:
    """A request for as many tokens as the context holds, cut to `max_tokens` if that is less; None: no limit."""
    if max_tokens is None or max_tokens >= request.max_tokens:
        return request
    sampling, forwarded = structs.replace(request.sampling, max_tokens=max_tokens), request.forwarded
    if forwarded is not None:
        forwarded = with_max_tokens(forwarded, max_tokens)
    return structs.replace(request, sampling=sampling, forwarded=forwarded)


def within_limits(group: Sequence[Request], max_tokens: int | None, limits: RateLimits) -> list[Request]:
    """The requests of a body that asks for `max_tokens`. If that is None, they share what their key allows a minute."""
    if max_tokens is not None or not limits.tokens_per_minute:
        return list(group)
    left = limits.tokens_per_minute - sum(len(request.prompt_token_ids) for request in group)
    share = max(left // sum(request.n for request in group), 1)
    return [limited(request, share) for request in group]
