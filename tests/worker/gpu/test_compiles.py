"""All that a worker launches at its start and in its steps compiles for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint

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


@pytest.mark.parametrize(
    ("model", "capability", "kv_cache_dtype"),
    [
        ({"family": "qwen3", "head_dim": 128, "num_heads": 4, "num_kv_heads": 2, "tied": True}, 90, "auto"),
        ({"head_dim": 64, "num_heads": 4, "num_kv_heads": 1, "bias": True}, 90, "fp8"),
        ({"head_dim": 128, "num_heads": 8, "num_kv_heads": 2}, 80, "auto"),
    ],
)
def test_everything_that_a_worker_launches_compiles(
    tmp_path: Path, model: dict[str, Any], capability: int, kv_cache_dtype: str
) -> None:
    folder = make_checkpoint(tmp_path, num_layers=1, **model)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.worker.gpu.compile_worker", str(folder), str(capability), kv_cache_dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} >= EXPECTED
    assert not [kernel for kernel in kernels if kernel["spilled"] > 64]
