from __future__ import annotations

import pytest

from eventlm.kernels.cpu.native import available_builds


@pytest.fixture(scope="session")
def builds() -> list[str]:
    """All that this machine can run, one at least: what is tested of each would otherwise be tested of none."""
    found = available_builds()
    if not found:
        pytest.skip("no build of the forward pass is compiled")
    return found
