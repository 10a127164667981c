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
from eventlm.engine.recovery.replay import ReplayedCore
from eventlm.engine.request import Put, Submission
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.spool.records import KeptReply
from eventlm.server.context import ServerContext
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


def _partial_drain() -> contextlib.AbstractContextManager[Any]:
    def finish(self: ReplayedCore) -> None:
        self._expected.clear()
        self._deliver()

    return patch.object(ReplayedCore, "finish", finish)


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


def _unarmed_deadline() -> contextlib.AbstractContextManager[Any]:
    go_on = EngineCore.go_on

    def go_on_unarmed(self: EngineCore) -> None:
        go_on(self)
        # The timer of the engine before still counts as armed.
        self._loop._armed_ns = self.core.next_timer_ns

    return patch.object(EngineCore, "go_on", go_on_unarmed)


def _lost_key() -> contextlib.AbstractContextManager[Any]:
    restore = RequestRegistry.restore

    def restore_without(self: RequestRegistry, kept: KeptReply, submission: Submission) -> list[Put]:
        return restore(self, kept, structs.replace(submission, idempotency_key=None))

    return patch.object(RequestRegistry, "restore", restore_without)


def _no_adopter() -> contextlib.AbstractContextManager[Any]:
    return patch.object(ServerContext, "adopt_orphans", lambda self, engine: None)


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
    "partial drain kept": Planted(
        "An engine goes on with a drain of which it lacks the last lines.",
        ("the next engine goes on", "the log verifies", "a log can be read"),
        _partial_drain,
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
    "deadline not armed after a recovery": Planted(
        "The engine that goes on takes the next timer for armed.",
        ("late requests are dropped",),
        _unarmed_deadline,
        draw_recovering_plan,
    ),
    "lost idempotency key": Planted(
        "Replies come back without their idempotency keys.",
        ("one execution a key", "replies are restored"),
        _lost_key,
        draw_recovering_plan,
    ),
    "no adopter": Planted(
        "Nobody looks for stop strings in texts that an engine goes on with.",
        ("edges end texts", "what was acknowledged outlives its engine", "resumed streams end"),
        _no_adopter,
        draw_recovering_plan,
    ),
}
