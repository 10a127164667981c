"""Runs a worker's start and some steps under a CUDA driver that runs nothing: every kernel is compiled as it is called.

As a program, with the folder of a checkpoint and the compute capability; prints the kernels by key, in JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from eventlm.worker.gpu import runner as gpu_runner_module
from eventlm.worker.warm_up import Shape, measure, warm_kernels
from tests.checkpoints import make_checkpoint
from tests.kernels.gpu.compiled_table import Kernel, read_table, run_launches
from tests.kernels.gpu.fake_driver import fake_driver
from tests.models.quantized.checkpoints import write_gpt_oss
from tests.worker.gpu.driven import gpu_runner

#: What writes the model to a folder, compute capability and dtype of the KV cache.
WORKERS: list[tuple[Callable[[Path], object], int, str]] = [
    (partial(make_checkpoint, num_layers=1, family="qwen3", head_dim=128, num_heads=4, tied=True), 90, "auto"),
    (partial(make_checkpoint, num_layers=1, head_dim=64, num_heads=4, num_kv_heads=1, bias=True), 90, "fp8"),
    (partial(make_checkpoint, num_layers=1, head_dim=128, num_heads=8), 80, "auto"),
    # It has packed experts, windows and sinks.
    (write_gpt_oss, 90, "auto"),
]


def worker_kernels(write: Callable[[Path], object], capability: int, kv_cache_dtype: str) -> dict[str, Kernel]:
    """The kernels that a worker with this model launches, by key."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        command = ["tests.worker.gpu.compile_worker", folder, str(capability), kv_cache_dtype]
        (kernels,) = run_launches(*command)
        return kernels


def main(folder: Path, capability: int, kv_cache_dtype: str) -> None:
    """A worker in bfloat16."""
    with (
        mock.patch.object(gpu_runner_module, "open_device", return_value=torch.device("cpu")),
        fake_driver(capability, read_table()) as driver,
    ):
        for is_invariant in (False, True):
            runner = gpu_runner(
                folder, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, batch_invariant=is_invariant, num_blocks=64
            )
            warm_kernels(runner)
            for shape in (Shape(1, 1, 32), Shape(8, 1, 100), Shape(1, 60, 30)):
                measure(runner, shape)
    print(json.dumps(driver.launched))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
