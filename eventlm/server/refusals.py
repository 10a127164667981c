"""Paths of other servers that this one does not have on purpose. Their errors say why, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from aiohttp import web


class RefusedPath(NamedTuple):
    """Requests that are refused by name. path: a regular expression for all of it. why: a clause."""

    path: str
    why: str


#: All of them.
REFUSED_PATHS = web.AppKey("refused_paths", Sequence[RefusedPath])


def why_refused(refused: Sequence[RefusedPath], path: str) -> str:
    """Why a path is refused; empty if nothing is known of it."""
    return next((each.why for each in refused if re.fullmatch(each.path, path)), "")
