from __future__ import annotations

import cmath
import math

import pytest
import torch

from eventlm.kernels.gpu.post_process import (
    Mode,
    Work,
    iterations_for,
    post_process,
    post_process_reference,
    work,
)

MODES: tuple[Mode, ...] = ("compute", "memory")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_values", "iterations"), [(1, 1), (1000, 2), (1025, 33), (20_000, 7), (0, 5)])
def test_against_the_reference(mode: Mode, num_values: int, iterations: int, device: torch.device) -> None:
    values = torch.randn(num_values, generator=torch.Generator().manual_seed(0)).to(device)
    before = values.clone()
    out = post_process(values, iterations=iterations, mode=mode)
    assert out.dtype == torch.float32
    exact = post_process_reference(values, iterations=iterations, mode=mode)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    assert torch.equal(values, before)


@pytest.mark.parametrize("mode", MODES)
def test_the_result_shows_how_often_it_was_done(mode: Mode, device: torch.device) -> None:
    """Also after many times, where float32 has rounded as often."""
    values = torch.tensor([1.0, -2.5], device=device)
    out = post_process(values, iterations=300, mode=mode).double()
    torch.testing.assert_close(out, post_process_reference(values, iterations=300, mode=mode), atol=1e-3, rtol=1e-3)
    for other in (299, 301, 150):
        assert not torch.allclose(out, post_process_reference(values, iterations=other, mode=mode), atol=1e-2, rtol=0)


def test_a_reference_turns_by_the_angle() -> None:
    turned = post_process_reference(torch.ones(1), iterations=15, mode="compute")
    assert math.isclose(turned.item(), cmath.rect(1, 1.5).real, abs_tol=1e-5)


def test_what_it_does() -> None:
    assert work(1000, iterations=3, mode="compute") == Work(num_flops=18_000, num_bytes=8_000)
    assert work(1000, iterations=3, mode="memory") == Work(num_flops=3_000, num_bytes=24_000)


@pytest.mark.parametrize("amount", [0, 1.0, 8000, 8001, 5e9, 1e12])
def test_the_iterations_of_an_amount(amount: float) -> None:
    for mode in MODES:
        iterations = iterations_for(amount, 1000, mode=mode)

        def done(times: int, mode: Mode = mode) -> int:
            did = work(1000, iterations=times, mode=mode)
            return did.num_flops if mode == "compute" else did.num_bytes

        assert done(iterations) >= amount
        assert iterations == 1 or done(iterations - 1) < amount
