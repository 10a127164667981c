"""The program `eventlm`, which is also `python -m eventlm`."""

from __future__ import annotations

import signal
import sys


def program() -> int:
    """Run the command line.

    While modules are loaded there is nothing to clean up: until `main` runs a command, Ctrl-C ends the process by the
    signal itself, without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from eventlm.cli.serve.standard_streams import open_standard_streams

    # Before anything else can be opened in their place.
    open_standard_streams()
    from eventlm.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(program())
