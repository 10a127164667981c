"""All that a worker launches at its start and in its steps compiles for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels.gpu.compiled_table import warn_if_compiled
from tests.models.quantized.checkpoints import write_gpt_oss
from tests.worker.gpu.compile_worker import WORKERS, worker_kernels

#: Compiling takes a minute where nothing else is done, and many where much is.
pytestmark = pytest.mark.timeout(1500)

EXPECTED = {"_decode_attention", "_prefill_attention", "_draw_rows", "_mask_limits", "_matmul_kernel"}
OF_PLAIN_MODELS = {"_qkv_store_kernel", "_add_rms_norm_kernel", "_gate_kernel"}
#: With another capability everything is compiled in `tests.kernels.gpu.test_compiles` too.
AT_ONCE = (1, 3)
OF_GPT_OSS = {"_store_heads_kernel", "_packed_matmul_kernel"}


@pytest.mark.parametrize(
    ("write", "capability", "kv_cache_dtype"),
    [pytest.param(*each, marks=[] if number in AT_ONCE else pytest.mark.soak) for number, each in enumerate(WORKERS)],
)
def test_everything_that_a_worker_launches_compiles(
    write: Callable[[Path], object], capability: int, kv_cache_dtype: str
) -> None:
    kernels = worker_kernels(write, capability, kv_cache_dtype)
    expected = EXPECTED | (OF_GPT_OSS if write is write_gpt_oss else OF_PLAIN_MODELS)
    assert {kernel["kernel"] for kernel in kernels.values()} >= expected
    assert not [kernel for kernel in kernels.values() if kernel["spilled"] > 64]
    warn_if_compiled(kernels)
