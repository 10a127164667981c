"""`GET /metrics`: the engine's metrics for Prometheus.

No key is needed, as for /health and in vLLM: it has counts and times, and no content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

from aiohttp import web
from msgspec import structs
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from eventlm.metrics.components import EngineMetrics
from eventlm.metrics.families import families
from eventlm.server.context import CONTEXT

OPENMETRICS = "application/openmetrics-text"
#: Media types of the reply.
MEDIA_TYPES = ("text/plain", OPENMETRICS)
_TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
#: Last line of an OpenMetrics reply.
_EOF = b"# EOF\n"


class RenderedMetrics(NamedTuple):
    """The reply to a scrape."""

    body: bytes
    content_type: str


class _OneFamily(Collector):
    """A registry of one family, so that families are encoded one by one."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        return iter((self._family,))


async def metrics(request: web.Request) -> web.Response:
    """In the format that the client accepts: Prometheus's text, or OpenMetrics."""
    context = request.app[CONTEXT]
    figures = await context.engine.read_metrics()
    if not figures.front_ends:
        figures = structs.replace(figures, http_requests=context.http_requests)
    reply = await render(figures, request.headers.get("Accept", ""), pid=context.engine_pid)
    return web.Response(body=reply.body, headers={"Content-Type": reply.content_type})


async def render(metrics: EngineMetrics, accept: str, *, pid: int | str = "self") -> RenderedMetrics:
    """The whole reply, with figures of the engine's process, `pid`.

    All figures are of one moment. The loop turns between families: with many replicas the encoding takes as long as
    several steps.
    """
    encode, content_type = _encoder(accept)
    parts = []
    process = ProcessCollector(pid=lambda: pid, registry=None)
    for family in chain(families(metrics), process.collect()):
        parts.append(encode(_OneFamily(family)).removesuffix(_EOF))
        await asyncio.sleep(0)
    if content_type == _OPENMETRICS_TYPE:
        parts.append(_EOF)
    return RenderedMetrics(b"".join(parts), content_type)


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Like `prometheus_client.choose_encoder`, which would turn the colons of vLLM's names into underscores."""
    if OPENMETRICS in accept:
        return partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8), _OPENMETRICS_TYPE
    return generate_latest, _TEXT_TYPE
