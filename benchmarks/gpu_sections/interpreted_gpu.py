"""A GPU that is Triton's interpreter: what engines of a smoke run are told that there is.

python -m benchmarks.gpu_sections.interpreted_gpu serve ...      is `eventlm serve ...` with it
"""

from __future__ import annotations

from unittest import mock

from eventlm.__main__ import program
from eventlm.compose import device
from eventlm.compose.gpus import FoundGpus, Gpu

GPU = Gpu(number=0, name="Triton's interpreter", total_bytes=8 << 30, free_bytes=8 << 30, capability=(9, 0))


def pretend() -> None:
    """Have this process find it. Workers run kernels in the interpreter where the environment says so."""
    mock.patch.object(device, "find_gpus", return_value=FoundGpus([GPU])).start()
    mock.patch.object(device, "missing_software", return_value="").start()


if __name__ == "__main__":
    pretend()
    raise SystemExit(program())
