"""Objects in and out; `tests/cli/debug/test_command.py` sends them to a process."""

from __future__ import annotations

import json

import msgspec
import pytest

from eventlm.errors import ExitCode
from eventlm.replay.debugger.protocol import DebugResponse, encode, respond
from eventlm.replay.debugger.session import Session


def test_a_command_that_succeeds(session: Session) -> None:
    response = respond(session, b'{"id": "x", "command": "next 5"}')
    line = encode(response)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    found = json.loads(line)
    assert (found["id"], found["position"], found["result"]["kind"]) == ("x", 5, "stop")
    assert found["lines"][0].startswith("event 5 ")
    assert "error" not in found
    assert msgspec.json.decode(line, type=DebugResponse) == response


@pytest.mark.parametrize(
    ("request_line", "kind", "exit_code"),
    [
        ('{"id": 1, "command": "find free <"}', "expression", ExitCode.USAGE),
        ('{"id": 1, "command": "goto nowhere"}', "usage", ExitCode.USAGE),
        ('{"id": 1, "command": 5}', "request", ExitCode.USAGE),
        ('{"id": 1, "command": "next", "more": 2}', "request", ExitCode.USAGE),
        ("next", "request", ExitCode.USAGE),
        ("[" * 100_000, "request", ExitCode.USAGE),
    ],
)
def test_a_command_that_fails(session: Session, request_line: str, kind: str, exit_code: int) -> None:
    found = json.loads(encode(respond(session, request_line)))
    assert (found["error"]["kind"], found["error"]["exit_code"], found["position"]) == (kind, exit_code, 0)
    assert "result" not in found


def test_an_error_of_an_expression_has_its_column(session: Session) -> None:
    found = json.loads(encode(respond(session, '{"command": "find free < 2 and fre > 3"}')))
    assert found["id"] is None
    assert (found["error"]["column"], found["error"]["source"]) == (14, "free < 2 and fre > 3")


def test_an_interrupted_command(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    check = session.interrupt.check

    def cancelling() -> None:
        session.cancel()
        check()

    monkeypatch.setattr(session.interrupt, "check", cancelling)
    found = json.loads(encode(respond(session, '{"id": 7, "command": "find req(4).skips > 99"}')))
    assert (found["id"], found["error"]["kind"]) == (7, "interrupted")
