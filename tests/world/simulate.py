"""Runs seeds of the simulated world: `python -m tests.world.simulate --help`."""

from __future__ import annotations

import sys

from tests.world.swarm.handlers import watch


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: all seeds passed; 1: something failed."""
    # Imported late, so that `watch` can be called first and sees these imports.
    from tests.world.swarm.command import run

    return run(arguments)


if __name__ == "__main__":
    watch()
    sys.exit(main())
