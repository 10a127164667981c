"""Keys travel in the environment, once."""

from __future__ import annotations

import os

import pytest

from eventlm.system.remote_ends import VARIABLE, RemoteEnds


def test_a_process_takes_its_keys_and_hands_them_on_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = RemoteEnds("tcp://10.0.0.1:5", b"server", b"public", b"secret")
    for name, value in ends.environment().items():
        monkeypatch.setenv(name, value)
    assert RemoteEnds.take() == ends
    assert VARIABLE not in os.environ
    assert RemoteEnds.take() is None
