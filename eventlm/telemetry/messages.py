"""Messages between the engine and the process that exports its spans: msgpack over a socket pair."""

from __future__ import annotations

from typing import Union

import msgspec
from msgspec import Struct


class ExportSetup(Struct, frozen=True, kw_only=True, tag="setup"):
    """The first message: the folder of the run, the URL to post to, and the event to begin with."""

    run_folder: str
    url: str
    from_s: int


class Callers(Struct, frozen=True, tag="callers"):
    """The `traceparent` of requests. It is sent after their arrival has been written to the log."""

    traceparent: str
    requests: list[int]


class StopExport(Struct, frozen=True, tag="stop"):
    """The log is complete: send what is left, and exit."""


class ExportReport(Struct, frozen=True, kw_only=True, tag="report"):
    """Counts of one process, once a second and at its end.

    num_dropped: spans by reason: `queue_full`, `refused` by the endpoint, `not_sent` in time at the end. num_failures:
    posts that failed, repeated ones too. problem: why the latest post failed; empty if it did not. next_s: how far it
    has read the log. resume_s: a process in place of this one would have to begin with this event, so that no span is
    lost.
    """

    num_sent: int = 0
    num_dropped: dict[str, int] = {}
    num_failures: int = 0
    num_waiting: int = 0
    problem: str = ""
    next_s: int = 0
    resume_s: int = 0


ToExport = Union[ExportSetup, Callers, StopExport]  # noqa: UP007
_to_export: msgspec.msgpack.Decoder[ToExport] = msgspec.msgpack.Decoder(ToExport)
encode = msgspec.msgpack.Encoder().encode
decode_to_export = _to_export.decode
decode_report = msgspec.msgpack.Decoder(ExportReport).decode
