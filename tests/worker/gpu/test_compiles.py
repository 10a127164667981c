"""All that a worker launches at its start and in its steps compiles for a GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.kernels.gpu.compiled_table import Kernel
from tests.kernels.gpu.test_compiles import run_launches, warn_if_compiled

#: Compiling takes a minute where nothing else is done, and many where much is.
pytestmark = pytest.mark.timeout(1500)

EXPECTED = {
    "_decode_attention",
    "_prefill_attention",
    "_qkv_store_kernel",
    "_add_rms_norm_kernel",
    "_silu_mul_kernel",
    "_draw_rows",
    "_mask_limits",
    "_matmul_kernel",
}


#: Shape of the model, compute capability and dtype of the KV cache.
WORKERS: list[tuple[dict[str, Any], int, str]] = [
    ({"family": "qwen3", "head_dim": 128, "num_heads": 4, "num_kv_heads": 2, "tied": True}, 90, "auto"),
    ({"head_dim": 64, "num_heads": 4, "num_kv_heads": 1, "bias": True}, 90, "fp8"),
    ({"head_dim": 128, "num_heads": 8, "num_kv_heads": 2}, 80, "auto"),
]


def worker_kernels(model: dict[str, Any], capability: int, kv_cache_dtype: str) -> dict[str, Kernel]:
    """The kernels that a worker with this model launches, by key."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), num_layers=1, **model)
        command = ["tests.worker.gpu.compile_worker", folder, str(capability), kv_cache_dtype]
        (kernels,) = run_launches(*command)
        return kernels


@pytest.mark.parametrize(("model", "capability", "kv_cache_dtype"), WORKERS)
def test_everything_that_a_worker_launches_compiles(
    model: dict[str, Any], capability: int, kv_cache_dtype: str
) -> None:
    kernels = worker_kernels(model, capability, kv_cache_dtype)
    assert {kernel["kernel"] for kernel in kernels.values()} >= EXPECTED
    assert not [kernel for kernel in kernels.values() if kernel["spilled"] > 64]
    warn_if_compiled(kernels)
