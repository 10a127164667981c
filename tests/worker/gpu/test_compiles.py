"""All that a worker launches at its start and in its steps compiles for a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.gpu.compiled_table import warn_if_compiled
from tests.worker.gpu.compile_worker import WORKERS, worker_kernels

#: Compiling takes a minute where nothing else is done, and many where much is.
pytestmark = pytest.mark.timeout(1500)

EXPECTED = {
    "_decode_attention",
    "_prefill_attention",
    "_qkv_store_kernel",
    "_add_rms_norm_kernel",
    "_gate_kernel",
    "_draw_rows",
    "_mask_limits",
    "_matmul_kernel",
}


@pytest.mark.parametrize(("model", "capability", "kv_cache_dtype"), WORKERS)
def test_everything_that_a_worker_launches_compiles(
    model: dict[str, Any], capability: int, kv_cache_dtype: str
) -> None:
    kernels = worker_kernels(model, capability, kv_cache_dtype)
    assert {kernel["kernel"] for kernel in kernels.values()} >= EXPECTED
    assert not [kernel for kernel in kernels.values() if kernel["spilled"] > 64]
    warn_if_compiled(kernels)
