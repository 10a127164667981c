"""Interruption and progress of long work."""

from __future__ import annotations

import pytest

from eventlm.errors import ExitCode
from eventlm.replay.debugger import interrupt as interrupt_module
from eventlm.replay.debugger.interrupt import Interrupt, InterruptedCommandError


def test_a_request_ends_the_work_once() -> None:
    interrupt = Interrupt()
    interrupt.check()
    interrupt.request()
    with pytest.raises(InterruptedCommandError) as error:
        interrupt.check()
    assert error.value.exit_code == ExitCode.INTERRUPTED
    interrupt.check()


def test_a_request_from_before_the_work_is_forgotten() -> None:
    interrupt = Interrupt()
    interrupt.request()
    interrupt.begin(10)
    interrupt.check()


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt_module, "_CHECKS_PER_PROGRESS", 3)
    seen: list[tuple[int, int]] = []
    interrupt = Interrupt(lambda done, total: seen.append((done, total)))
    for _ in range(7):
        interrupt.check()
    assert not seen
    interrupt.expect(7)
    for _ in range(9):
        interrupt.check()
    assert seen == [(3, 7), (6, 7), (7, 7)]
