"""The machine's own figures, in the process that measures them."""

from __future__ import annotations

import pytest

from eventlm.bench import machine_probe
from eventlm.errors import EventLMError


def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probe, "_SIDE", 256)
    monkeypatch.setattr(machine_probe, "_PRODUCT_SIDE", 128)
    machine = machine_probe.measure(1)
    # No machine that runs this takes a millisecond for 256 KiB, or a second for four million FLOPs.
    assert machine.bytes_per_second > 256 * 1024 / 1e-3
    assert machine.flops_per_second > 2 * 128**3


async def test_what_went_wrong_is_told() -> None:
    with pytest.raises(EventLMError, match=r"could not be measured: RuntimeError: \S+"):
        await machine_probe.probe(-1)
