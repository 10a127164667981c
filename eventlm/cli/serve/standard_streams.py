"""Standard streams that were closed when the program started."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Connect those of descriptors 0 to 2 that are closed with the null device.

    Otherwise the next files and sockets get these numbers: libuv aborts where it closes one of them, and what is
    printed, by children too, goes to whatever is behind it. The interpreter leaves out the streams of closed ones.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, so that it is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # They live as long as the process.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
