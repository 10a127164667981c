"""Small arrays on their way from the host to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, on a processor its very memory. What the device has still to do is not waited for.

    A copy from memory that is not pinned would wait; what is pinned here is kept until it has been copied.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
