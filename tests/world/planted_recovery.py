"""Bugs in what lets an engine go on where the one before has died."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from msgspec import structs

from eventlm.bus.log_writer import LogWriter
from eventlm.bus.recorder import Effect
from eventlm.bus.spool import SpoolWriter
from eventlm.core.core import Core
from eventlm.engine.block_names import BlockNames
from eventlm.engine.core_loop import CoreLoop
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.live_requests import Sink
from eventlm.engine.recovery.replay import ReplayedCore
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.spool.records import KeptReply
from eventlm.server.endpoints import resumption
from eventlm.server.stream_events import StreamPosition
from tests.world.plans.plan import draw_recovering_plan
from tests.world.planted_bug import Planted


def _log_before_spool() -> contextlib.AbstractContextManager[Any]:
    append = LogWriter.append_records

    def append_those_before(self: LogWriter, frames: Sequence[bytes]) -> None:
        before = self.__dict__.get("frames", [])
        self.__dict__["frames"] = [*frames]
        append(self, before)

    return patch.object(LogWriter, "append_records", append_those_before)


def _spool_not_synced() -> contextlib.AbstractContextManager[Any]:
    return patch.multiple(SpoolWriter, sync=lambda self: None, sync_next=lambda self: None)


def _reused_block_number() -> contextlib.AbstractContextManager[Any]:
    make = BlockNames.__init__

    def make_new(self: BlockNames, key: bytes, **options: Any) -> None:
        make(self, key, **options | {"next_integer": 1})

    return patch.object(BlockNames, "__init__", make_new)


def _deleted_reply_back() -> contextlib.AbstractContextManager[Any]:
    def drop(self: EngineCore, reply_id: str, then: Effect) -> None:
        then()

    return patch.object(EngineCore, "drop_reply", drop)


def _spool_never_emptied() -> contextlib.AbstractContextManager[Any]:
    return patch.object(EngineCore, "note_over", lambda self: None)


def _lost_key() -> contextlib.AbstractContextManager[Any]:
    restore = RequestRegistry.restore

    def restore_without(self: RequestRegistry, kept: KeptReply) -> Sequence[Sink]:
        submission = kept.submission and structs.replace(kept.submission, idempotency_key=None)
        return restore(self, structs.replace(kept, submission=submission))

    return patch.object(RequestRegistry, "restore", restore_without)


def _partial_drain() -> contextlib.AbstractContextManager[Any]:
    return patch.object(ReplayedCore, "finish", ReplayedCore._deliver)


def _unarmed_timers() -> contextlib.AbstractContextManager[Any]:
    make = CoreLoop.__init__

    def make_armed(self: CoreLoop, core: Core, *parts: Any, **options: Any) -> None:
        with patch.object(CoreLoop, "_arm_timer", lambda self: None):
            make(self, core, *parts, **options)
        self._armed_ns = core.next_timer_ns

    return patch.object(CoreLoop, "__init__", make_armed)


def _from_the_start() -> contextlib.AbstractContextManager[Any]:
    return patch.object(resumption, "_position", lambda request: StreamPosition())


_LOST = ("nothing written is cut off", "replies are restored", "what was acknowledged outlives its engine")
IN_RECOVERY = {
    "log before spool": Planted(
        "The records of a drain are written with the next one.", _LOST, _log_before_spool, draw_recovering_plan
    ),
    "spool not synced": Planted(
        "The log is synced, but not the spool.",
        (*_LOST, "the next engine goes on", "nothing is damaged", "replies are kept"),
        _spool_not_synced,
        draw_recovering_plan,
    ),
    "block number reused": Planted(
        "The engine that goes on numbers blocks from 1 on.",
        ("blocks keep their names",),
        _reused_block_number,
        draw_recovering_plan,
    ),
    "deleted reply back": Planted(
        "The spool does not say that a reply was deleted.",
        ("deleted replies do not come back",),
        _deleted_reply_back,
        draw_recovering_plan,
    ),
    "spool never emptied": Planted(
        "No segment begins when replies are over.", ("spools forget",), _spool_never_emptied, draw_recovering_plan
    ),
    "partial drain kept": Planted(
        "A drain of which decisions are missing is not cut off.",
        ("the log verifies", "a reboot leaves what comes first"),
        _partial_drain,
        draw_recovering_plan,
    ),
    "timers not armed again": Planted(
        "The engine that goes on does not wake for deadlines.",
        ("late requests are dropped",),
        _unarmed_timers,
        draw_recovering_plan,
    ),
    "stream from its start": Planted(
        "A client that resumes a stream gets all of it again.",
        ("nothing shown that the log lacks", "cut texts begin the reference's"),
        _from_the_start,
        draw_recovering_plan,
    ),
    "lost idempotency key": Planted(
        "Replies come back without their idempotency keys.",
        ("one execution a key", "replies are restored"),
        _lost_key,
        draw_recovering_plan,
    ),
}
