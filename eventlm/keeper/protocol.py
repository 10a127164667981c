"""Messages between the keeper and an engine's process: msgpack over a socket pair. No pickle, no code.

The keeper sends `Prepare` first. The process answers `EnginePrepared`, or it sends `StartFailed` and ends. After
`TakeOver` it serves, and sends `Serving` once it takes requests. It sends an `EngineBeat` at intervals all the time.

A keeper outlives the code that it was started from, so later versions of eventlm may add fields with defaults. Anything
else needs a new `VERSION`.
"""

from __future__ import annotations

from typing import Any, Literal, Union

import msgspec
from msgspec import Struct

from eventlm.config import Config
from eventlm.system.left_process import LeftProcess

VERSION = 2


class ConfigSource(Struct, frozen=True):
    """Where a configuration is read from: a file, if there is one, and options of the command line by name."""

    path: str | None
    options: dict[str, Any]


class Prepare(Struct, frozen=True, kw_only=True, tag="prepare"):
    """Get ready to take over. config: what to serve, as `encode` makes it.

    source: in its place, where to read the configuration, which is then checked beside the engine that serves now.
    ahead: there is no hurry.
    """

    version: int
    config: bytes = b""
    source: ConfigSource | None = None
    ahead: bool = False


class TakeOver(Struct, frozen=True, tag="take_over"):
    """Serve. follows: why the engine before has ended, in words; empty if there was none. front_ends: the numbers of
    those that the keeper has sockets for. address: where they listen. workers: those that the engine before has left.
    ended_ns: when that one ended, on this host's monotonic clock; 0: there was none.

    The engine passes the keeper a socket for each front end, with its number. It is connected to the front end's
    process, which is started if there is none. The keeper answers `FrontEndRuns`.
    """

    follows: str
    front_ends: list[int] = []
    address: tuple[str, int] = ("", 0)
    workers: list[LeftProcess] = []
    ended_ns: int = 0


class KeeperSignal(Struct, frozen=True, tag="signal"):
    """reload: reload files that may have changed. drain: refuse new requests, finish the running ones, and exit. cut:
    end the running requests now.
    """

    kind: Literal["reload", "drain", "cut"]


class HandOver(Struct, frozen=True, tag="hand_over"):
    """Close the log between two steps, without an end, and exit: another process is ready to go on."""


class RestartAnswer(Struct, frozen=True, tag="restart_answer"):
    """Of the `RestartRequest` with this number: why there is no restart, in one line; empty if there is one."""

    id: int
    error: str


class FrontEndRuns(Struct, frozen=True, tag="front_end_runs"):
    """The process of a front end. error: why there is none, in words."""

    number: int
    pid: int = 0
    error: str = ""


class FrontEndEnded(Struct, frozen=True, tag="front_end_ended"):
    """The process of a front end that the engine is connected to has ended. status: as EngineProcess has it."""

    number: int
    pid: int
    status: int


class EnginePrepared(Struct, frozen=True, tag="prepared"):
    """It can take over with this configuration. kept: its options that the keeper goes by."""

    config: bytes
    kept: dict[str, str | int | bool]


class Serving(Struct, frozen=True, tag="serving"):
    """It takes requests."""


class EngineWorkers(Struct, frozen=True, tag="workers"):
    """Its workers, as far as another engine could take them over."""

    workers: list[LeftProcess]


class EngineBeat(Struct, frozen=True, tag="heartbeat"):
    """It is alive."""


class StartFailed(Struct, frozen=True, tag="failed"):
    """It cannot start, by a mistake that a user can mend or wait for: the error's line and its exit code."""

    message: str
    exit_code: int


class RestartRequest(Struct, frozen=True, tag="restart"):
    """An operator asks for a restart."""

    id: int


class EndFrontEnd(Struct, frozen=True, tag="end_front_end"):
    """Kill the process of a front end. for_good: there will be no other one, so its sockets are closed."""

    number: int
    for_good: bool = False


ToEngine = Union[Prepare, TakeOver, KeeperSignal, HandOver, RestartAnswer, FrontEndRuns, FrontEndEnded]  # noqa: UP007
FromEngine = Union[EnginePrepared, Serving, EngineWorkers, EngineBeat, StartFailed, RestartRequest, EndFrontEnd]  # noqa: UP007

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_config = msgspec.msgpack.Decoder(Config).decode


def kept_options(config: Config) -> dict[str, str | int | bool]:
    """The options that the keeper goes by, or that say where a run goes on. They stay as they are while it lives."""
    return {
        "--host": config.server.host,
        "--port": config.server.port,
        "--model": config.model.model,
        "--api-servers": config.server.api_servers,
        "--heartbeat-timeout-seconds": config.worker.heartbeat_timeout_seconds,
        "--record": config.record.record,
        "--record-tokens": config.record.record_tokens,
        "--recover": config.record.recover,
    }
