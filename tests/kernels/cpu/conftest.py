from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing by a second thread, and wait for it where the machine is busy."""
    torch.set_num_threads(1)
