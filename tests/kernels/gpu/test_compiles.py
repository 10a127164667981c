"""Each launch of `tests.kernels.gpu.compiled` compiles for the GPUs of today, within what they have, without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

#: Compiling takes a minute where nothing else is done, and many where much is.
pytestmark = pytest.mark.timeout(1500)

#: Compute capabilities of A100 and of H100 and H200.
CAPABILITIES = (80, 90)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_everything_compiles(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.gpu.fake_driver", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert launches
    assert not [launch for launch in launches if launch["error"]]
    # A launch that reaches no kernel would say nothing.
    assert not [launch["launch"] for launch in launches if not launch["kernels"]]
    # One for each dtype, or requests would wait for another.
    assert [len(launch["kernels"]) for launch in launches if launch["launch"].startswith("penalties: ")] == [1, 1]
    spilling = {
        launch["launch"]: kernel for launch in launches for kernel in launch["kernels"] if kernel["spilled"] > 64
    }
    assert not spilling
