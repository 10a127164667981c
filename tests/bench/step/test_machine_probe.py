"""The machine's own figures, in the process that measures them."""

from __future__ import annotations

import pytest
import torch

from eventlm.bench.step import machine_probe
from eventlm.errors import EventLMError


def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probe, "_SIDE", 256)
    monkeypatch.setattr(machine_probe, "_PRODUCT_SIDE", 128)
    machine = machine_probe.measure(1)
    # No machine that runs this takes a millisecond for 256 KiB, or a second for four million FLOPs.
    assert machine.bytes_per_second > 256 * 1024 / 1e-3
    assert machine.flops_per_second > 2 * 128**3


@pytest.mark.parametrize(
    ("bfloat16_s", "fastest_s", "large"),
    # A large product takes as long as eight small ones: it is left out from a second on.
    [
        (0.01, 0.01, {torch.float32, torch.bfloat16}),
        (0.1, 0.1, {torch.float32, torch.bfloat16}),
        (0.2, 0.1, {torch.float32}),
    ],
)
def test_bfloat16_is_left_out_where_a_large_product_of_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, bfloat16_s: float, fastest_s: float, large: set[torch.dtype]
) -> None:
    multiply, now = torch.mm, [0.0]
    found: set[torch.dtype] = set()

    def made_up_mm(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        now[0] += 0.1 if first.dtype == torch.float32 else bfloat16_s
        if len(first) > machine_probe._TRIAL_SIDE:
            found.add(first.dtype)
        return multiply(first, second)

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(torch, "mm", made_up_mm)
    monkeypatch.setattr(machine_probe.time, "perf_counter", clock)
    monkeypatch.setattr(machine_probe, "_SIDE", 16)
    monkeypatch.setattr(machine_probe, "_TRIAL_SIDE", 8)
    monkeypatch.setattr(machine_probe, "_PRODUCT_SIDE", 16)
    machine = machine_probe.measure(1)
    assert machine.flops_per_second == pytest.approx(2 * 16**3 / (fastest_s + 0.001))
    assert found == large


def test_slow_runs_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ranks share the processors, or other programs use them."""
    now, runs = [0.0], []

    def action() -> None:
        runs.append(now[0])
        now[0] += 0.75

    monkeypatch.setattr(machine_probe.time, "perf_counter", lambda: now[0])
    assert machine_probe._best_s(action) == 0.75
    assert len(runs) == 3


async def test_an_error_is_reported() -> None:
    with pytest.raises(EventLMError, match=r"could not be measured: RuntimeError: \S+"):
        await machine_probe.probe(-1)
