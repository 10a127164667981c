"""Which build of the compiled forward pass a value of `--cpu-kernels` means on this machine. Loads no torch."""

from __future__ import annotations

from eventlm.errors import UsageError
from eventlm.kernels.cpu import native

#: The values that name no build.
AUTO, TORCH = "auto", "torch"


def choose_build(wanted: str) -> str:
    """With `auto` the fastest one; empty for torch's operations.

    Raises UsageError if the one that is wanted is not available.
    """
    if wanted == TORCH:
        return ""
    available = native.available_builds()
    if wanted == AUTO:
        return available[0] if available else ""
    if wanted in available:
        return wanted
    lacks = not native.BUILDS[wanted] <= native.processor_flags()
    reason = "its processor lacks what they need" if lacks else "they are not compiled"
    raise UsageError(
        f"--cpu-kernels {wanted}: not on this machine, {reason}; available: {', '.join((AUTO, *available, TORCH))}"
    )
