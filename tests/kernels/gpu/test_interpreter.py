from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import eventlm.kernels.gpu.interpreter  # noqa: F401 - its mend


@triton.jit
def _convert(x, out, N: tl.constexpr):
    indices = tl.arange(0, N)
    values = tl.load(x + indices).to(tl.float32)
    tl.store(out + indices, values.to(out.dtype.element_ty))


@triton.jit
def _count(out, times):
    counted = 0
    for _ in range(times):
        counted += 1
    tl.store(out, counted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_kernels_round_as_torch_does(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * 100
    x[:512] = torch.linspace(-0.1, 0.1, 512)
    x[512:516] = torch.tensor([448.0, -448.00003, 0.0, torch.nan])
    x = x.clamp(-448.00003, 448.00003).to(device)
    out, back = torch.empty(4096, dtype=dtype, device=device), torch.empty(4096, device=device)
    _convert[(1,)](x, out, 4096)
    assert torch.equal(out.float().nan_to_num(1000), x.to(dtype).float().nan_to_num(1000))
    _convert[(1,)](out, back, 4096)
    assert torch.equal(back.nan_to_num(1000), out.float().nan_to_num(1000))


def test_fp8_saturates(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    out = torch.empty(2, dtype=torch.float8_e4m3fn, device=device)
    _convert[(1,)](torch.tensor([1000.0, -torch.inf], device=device), out, 2)
    assert out.tolist() == [448.0, -448.0]


def test_loops_end_at_arguments(device: torch.device) -> None:
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _count[(1,)](out, 7)
    assert out.item() == 7
