"""An OTLP receiver over HTTP, in a thread of its own: keeps the spans that it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """Answers with the statuses in `statuses`, in their order, and then with 200."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.statuses: list[int] = []
        #: Of each request that succeeds.
        self.num_rejected = 0
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        assert request.content_type == "application/x-protobuf"
        self.headers.append(dict(request.headers))
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        partial = ExportTracePartialSuccess(rejected_spans=self.num_rejected)
        answer = ExportTraceServiceResponse(partial_success=partial)
        return web.Response(body=answer.SerializeToString(), content_type="application/x-protobuf")

    @property
    def spans(self) -> list[Span]:
        """In the order of their arrival; one that was sent again replaces the first."""
        found = {
            span.span_id: span
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }
        return list(found.values())

    @property
    def roots(self) -> dict[int, Span]:
        """The spans of whole requests, by the request."""
        return {
            next(pair.value.int_value for pair in span.attributes if pair.key == "eventlm.request"): span
            for span in self.spans
            if span.name == "llm_request"
        }


def check_phases_add_up(spans: list[Span]) -> int:
    """The phases of each request, or of its samples, follow each other and add up to it; how many have phases."""
    below: dict[bytes, list[Span]] = defaultdict(list)
    for span in spans:
        if span.name not in ("llm_request", "sample"):
            below[span.parent_span_id].append(span)
    above = {span.span_id: span for span in spans if span.name in ("llm_request", "sample")}
    for identity, phases in below.items():
        whole = above[identity]
        phases.sort(key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
        assert {span.trace_id for span in phases} == {whole.trace_id}
        borders = [whole.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
        assert [span.start_time_unix_nano for span in phases] == borders[:-1]
        assert borders[-1] == whole.end_time_unix_nano
    return len(below)


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of this machine."""
    receiver, started, loop = Receiver(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/traces", receiver.take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield receiver
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
