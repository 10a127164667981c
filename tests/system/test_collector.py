"""What the collector goes through, and when."""

from __future__ import annotations

import gc

import pytest

from eventlm.system.collector import collector_off, lasting_objects


def test_what_is_made_meanwhile_is_not_gone_through_then_or_later() -> None:
    phases: list[str] = []
    gc.callbacks.append(lambda phase, _: phases.append(phase))
    try:
        with lasting_objects():
            made = [[number] for number in range(100_000)]
        assert phases == []
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert not any(each is made for each in gc.get_objects())
    after = [0]
    assert any(each is after for each in gc.get_objects())


def test_what_is_made_while_the_collector_is_off_is_gone_through_later() -> None:
    phases: list[str] = []
    gc.callbacks.append(lambda phase, _: phases.append(phase))
    try:
        with collector_off():
            made = [[number] for number in range(100_000)]
            assert phases == []
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert any(each is made for each in gc.get_objects())


def test_an_error_leaves_the_collector_running() -> None:
    with pytest.raises(LookupError), lasting_objects():
        raise LookupError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with lasting_objects():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
