from __future__ import annotations

import pytest
import torch

from eventlm.kernels.kv_quantization import STORED_DTYPES, dequantize, is_quantized, quantize
from eventlm.kernels.kv_store import head_slots, kv_store
from eventlm.kernels.paged_attention import AttentionRow, paged_attention, plan_attention

#: Half of the step between neighbours, of the largest element and of the element itself.
STEPS = {"int8": (0.5 / 127, 0.0), "fp8": (2.0**-10 / 448, 2.0**-4)}


@pytest.mark.parametrize("kv_dtype", STORED_DTYPES)
def test_each_element_is_rounded_to_its_nearest(kv_dtype: str) -> None:
    values = torch.randn(50, 3, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 9, 32)
    values[0, 0] = 0
    stored = quantize(values, STORED_DTYPES[kv_dtype])
    assert stored.shape == (50, 3, 36)
    assert is_quantized(stored)
    found = dequantize(stored, torch.float32)
    of_largest, of_itself = STEPS[kv_dtype]
    allowed = (values.abs().amax(-1, keepdim=True) * of_largest).maximum(values.abs() * of_itself) * 1.0001
    assert ((found - values).abs() <= allowed).all()
    assert not found[0, 0].any()


@pytest.mark.parametrize("kv_dtype", STORED_DTYPES)
def test_what_is_no_number_stays_so(kv_dtype: str) -> None:
    values = torch.ones(2, 32)
    values[0, 3], values[1, 4] = torch.nan, torch.inf
    assert not dequantize(quantize(values, STORED_DTYPES[kv_dtype]), torch.float32).isfinite().all(-1).any()


@pytest.mark.parametrize("kv_dtype", STORED_DTYPES)
def test_what_is_next_to_nothing_is_zeros(kv_dtype: str) -> None:
    """The inverse of its scale would be infinite."""
    values = torch.ones(5, 1) * torch.linspace(-1, 1, 33)
    values[:4] *= torch.tensor([1e-36, 1e-38, 1e-40, 0.0])[:, None]
    found = dequantize(quantize(values, STORED_DTYPES[kv_dtype]), torch.float32)
    assert not found[:4].any()
    assert torch.allclose(found[4], values[4], rtol=2**-4, atol=0.01)


@pytest.mark.parametrize("kv_dtype", STORED_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_is_that_over_what_the_elements_are_rounded_to(kv_dtype: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(40, 2, 16, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(33, 4, 16, generator=generator).to(dtype)
    rows = [AttentionRow(7, 32, torch.tensor([1, 0, 3]).numpy()), AttentionRow(0, 1, torch.tensor([2]).numpy())]
    slots = head_slots(torch.tensor([*range(16, 32), *range(16), *range(48, 55), 32]), block_size=16, num_kv_heads=2)
    quantized = torch.zeros(2, 4, 2, 16, 20, dtype=STORED_DTYPES[kv_dtype])
    plain = torch.zeros(2, 4, 2, 16, 16, dtype=dtype)
    kv_store(quantized, k, v, slots)
    rounded_k, rounded_v = (dequantize(quantize(x, STORED_DTYPES[kv_dtype]), dtype) for x in (k, v))
    kv_store(plain, rounded_k, rounded_v, slots)
    found = paged_attention(q, quantized, plan_attention(rows, quantized, dtype), scale=0.25)
    expected = paged_attention(q, plain, plan_attention(rows, plain), scale=0.25)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
