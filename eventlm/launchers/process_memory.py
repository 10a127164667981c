"""Whether the memory of this host holds so many worker processes."""

from __future__ import annotations

from collections.abc import Mapping

from eventlm.errors import TooLittleMemoryError
from eventlm.system.free_memory import free_bytes
from eventlm.worker.protocol import FAKE_MODEL

#: What a worker process takes at least beside its model, most of it for its libraries.
PROCESS_BYTES = 128 << 20
#: The same of a fake one.
FAKE_PROCESS_BYTES = 12 << 20


def check_process_memory(num_workers: Mapping[str, int], advice: str) -> None:
    """Raise TooLittleMemoryError if the memory that is free does not hold so many workers of each model.

    advice: what to do about it, as the rest of a sentence.
    """
    needed = sum(
        number * (FAKE_PROCESS_BYTES if model == FAKE_MODEL else PROCESS_BYTES) for model, number in num_workers.items()
    )
    num_here = sum(num_workers.values())
    if num_here > 1 and needed > (free := free_bytes()):
        raise TooLittleMemoryError(
            f"{num_here:,} worker processes take at least {needed >> 20:,} MiB beside their model, and {free >> 20:,} "
            f"MiB of memory are free here; {advice}"
        )
