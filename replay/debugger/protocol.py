"""The debugger for programs: for each command a JSON object in, and one out. `eventlm debug --json` speaks it."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from eventlm.errors import EventLMError, ExitCode
from eventlm.replay.debugger.interrupt import InterruptedCommandError
from eventlm.replay.debugger.session import Session
from eventlm.replay.expressions.errors import ExpressionError

ErrorKind: TypeAlias = Literal["request", "expression", "usage", "interrupted", "failed"]


class DebugRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`{"id": 1, "command": "next 5"}`. id: whatever the response shall repeat."""

    command: str
    id: int | str | None = None


class DebugError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a command failed. column: in `source`, counted from 1, of an error in an expression."""

    kind: ErrorKind
    message: str
    exit_code: int
    column: int | UnsetType = UNSET
    source: str | UnsetType = UNSET


class DebugResponse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """position: the event after the command. result: of a command that succeeded, with its `kind`; `lines` is the same
    for people. error: of one that failed; the position is what it was.
    """

    id: int | str | None
    position: int
    result: dict[str, Any] | UnsetType = UNSET
    lines: list[str] | UnsetType = UNSET
    error: DebugError | UnsetType = UNSET


def respond(session: Session, request: bytes | str) -> DebugResponse:
    """Run one request. Never raises for what is wrong with it."""
    identity: int | str | None = None
    try:
        found = msgspec.json.decode(request, type=DebugRequest)
        identity = found.id
        result = session.execute(found.command)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        failed = DebugError(kind="request", message=f"no request: {error}", exit_code=ExitCode.USAGE)
    except ExpressionError as error:
        failed = DebugError(
            kind="expression",
            message=str(error),
            exit_code=error.exit_code,
            column=error.column,
            source=error.source,
        )
    except EventLMError as error:
        kind: ErrorKind = "usage" if error.exit_code == ExitCode.USAGE else "failed"
        kind = "interrupted" if isinstance(error, InterruptedCommandError) else kind
        failed = DebugError(kind=kind, message=str(error), exit_code=error.exit_code)
    else:
        return DebugResponse(
            id=identity, position=session.position, result=result.to_object(), lines=list(result.lines())
        )
    return DebugResponse(id=identity, position=session.position, error=failed)


def encode(response: DebugResponse) -> bytes:
    """A line."""
    return msgspec.json.encode(response) + b"\n"
