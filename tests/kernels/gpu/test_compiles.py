"""Each launch of `tests.kernels.gpu.compiled` compiles for the GPUs of today, within what they have, without spills."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.compiled_table import Kernel, warn_if_compiled
from tests.kernels.gpu.fake_driver import CAPABILITIES, launches

#: Compiling takes a minute where nothing else is done, and many where much is.
pytestmark = pytest.mark.timeout(1500)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_everything_compiles(capability: int) -> None:
    launched = launches(capability)
    assert launched
    assert not [launch for launch in launched if launch["error"]]
    # A launch that reaches no kernel would say nothing.
    assert not [launch["launch"] for launch in launched if not launch["kernels"]]
    # One for each dtype, or requests would wait for another.
    assert [len(launch["kernels"]) for launch in launched if launch["launch"].startswith("penalties: ")] == [1, 1]
    kernels: dict[str, Kernel] = {key: kernel for launch in launched for key, kernel in launch["kernels"].items()}
    assert not [kernel for kernel in kernels.values() if kernel["spilled"] > 64]
    warn_if_compiled(kernels)
