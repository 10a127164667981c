"""What this process knows of a launcher such as mpiexec that started it as one of several ranks."""

from __future__ import annotations

import contextlib
import os
import stat
import time

#: A launcher kills ranks when another ends with an error, and with them what they are about to print.
PARTING_SECONDS = 0.3
#: MPICH's, Intel MPI's; Open MPI's.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def num_launched() -> int:
    """How many ranks the launcher started; 1 without a launcher."""
    sizes = (os.environ.get(name, "") for name in _SIZES)
    return next((int(size) for size in sizes if size.isdecimal()), 1)


def end_launched(exit_code: int) -> None:
    """End all ranks from one that fails before it takes part in MPI; without a launcher, do nothing.

    MPICH's launcher would let the others wait for ever: its processes talk to it through a socket, on which a line ends
    them all. Open MPI's ends them itself when one fails.
    """
    if num_launched() == 1:
        return
    time.sleep(PARTING_SECONDS)
    with contextlib.suppress(KeyError, ValueError, OSError):
        launcher = int(os.environ["PMI_FD"])
        if stat.S_ISSOCK(os.fstat(launcher).st_mode):
            os.write(launcher, f"cmd=abort exitcode={exit_code}\n".encode())


def leave_to_mpi() -> None:
    """From now on MPI alone talks to the launcher, and ends all ranks when one fails."""
    os.environ.pop("PMI_FD", None)
