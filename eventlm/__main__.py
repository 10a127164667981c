"""The program `eventlm`, which is also `python -m eventlm`."""

from __future__ import annotations

import os
import signal
import sys


def program() -> int:
    """Run the command line.

    While modules are loaded there is nothing to clean up: until `main` runs a command, Ctrl-C ends the process by the
    signal itself, without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Before anything else can be opened in their place.
    _open_standard_streams()
    from eventlm.cli.main import main

    return main()


def _open_standard_streams() -> None:
    """Connect those of descriptors 0 to 2 that are closed with the null device.

    Otherwise the next files and sockets get these numbers: libuv aborts where it closes one of them, and what is
    printed, by children too, goes to whatever it stands for. The interpreter leaves out the streams of closed ones.
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


if __name__ == "__main__":
    sys.exit(program())
