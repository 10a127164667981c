"""Who made a request: what its key says of it."""

from __future__ import annotations

from typing import Literal

from aiohttp import web
from msgspec import Struct

from eventlm.engine.rate_limits import NO_LIMITS, RateLimits

Scope = Literal["inference", "admin"]


class Principal(Struct, frozen=True, kw_only=True):
    """The holder of a key. Never logged but for its name.

    name: of the key in the configuration; empty where no key is asked for. owner: stands for the key where what
    belongs to it must be told from what does not (streams, explanations, prefix caches); it gives nothing away of the
    key itself. service_class: of its requests. limits: of what they may use.
    """

    name: str = ""
    owner: str = ""
    scopes: tuple[Scope, ...] = ("inference",)
    service_class: str = ""
    limits: RateLimits = NO_LIMITS


#: Where no key is asked for. Admin endpoints always ask for one.
ANYBODY = Principal()
PRINCIPAL = web.RequestKey("principal", Principal)
