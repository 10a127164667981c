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
from eventlm.engine.block_names import BlockNames
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.request import Put, Submission
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.spool.records import KeptReply
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

    def restore_without(self: RequestRegistry, kept: KeptReply, submission: Submission) -> list[Put]:
        return restore(self, kept, structs.replace(submission, idempotency_key=None))

    return patch.object(RequestRegistry, "restore", restore_without)


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
    "lost idempotency key": Planted(
        "Replies come back without their idempotency keys.",
        ("one execution a key", "replies are restored"),
        _lost_key,
        draw_recovering_plan,
    ),
}
