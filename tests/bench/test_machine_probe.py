"""The machine's own figures, in the process that measures them."""

from __future__ import annotations

import pytest
import torch

from eventlm.bench import machine_probe
from eventlm.errors import EventLMError


def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probe, "_SIDE", 256)
    monkeypatch.setattr(machine_probe, "_PRODUCT_SIDE", 128)
    machine = machine_probe.measure(1)
    # No machine that runs this takes a millisecond for 256 KiB, or a second for four million FLOPs.
    assert machine.bytes_per_second > 256 * 1024 / 1e-3
    assert machine.flops_per_second > 2 * 128**3


@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float32])
def test_only_the_faster_type_is_measured_with_large_products(
    monkeypatch: pytest.MonkeyPatch, fast: torch.dtype
) -> None:
    """Where processors have no bfloat16, one product of it may take a minute."""
    multiply, now = torch.mm, [0.0]
    large: list[torch.dtype] = []

    def made_up_mm(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        now[0] += 1.0 if first.dtype == fast else 60.0
        if len(first) > machine_probe._TRIAL_SIDE:
            large.append(first.dtype)
        return multiply(first, second)

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(torch, "mm", made_up_mm)
    monkeypatch.setattr(machine_probe.time, "perf_counter", clock)
    monkeypatch.setattr(machine_probe, "_SIDE", 16)
    monkeypatch.setattr(machine_probe, "_TRIAL_SIDE", 8)
    monkeypatch.setattr(machine_probe, "_PRODUCT_SIDE", 16)
    machine = machine_probe.measure(1)
    assert machine.flops_per_second == 2 * 16**3 / 1.5
    assert set(large) == {fast}


async def test_what_went_wrong_is_told() -> None:
    with pytest.raises(EventLMError, match=r"could not be measured: RuntimeError: \S+"):
        await machine_probe.probe(-1)
