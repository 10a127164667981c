"""Runs seeds of the simulated world: `python -m tests.world.simulate --help`."""

from __future__ import annotations

import sys

from tests.world.swarm.handlers import watch


def main(arguments: list[str] | None = None) -> int:
    """0: all seeds passed; 1: something failed."""
    # Not above: what is imported here is watched, if that is asked for before.
    from tests.world.swarm.command import run

    return run(arguments)


if __name__ == "__main__":
    watch()
    sys.exit(main())
