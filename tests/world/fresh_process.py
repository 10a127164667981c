"""Runs a program in new processes in which strings have other hashes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.processes import PATIENCE_SECONDS


def printed_with_other_hashes(program: str) -> set[str]:
    """What a program prints in two processes with different string hashes: one line if it depends on no hash."""
    return {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        ).stdout.strip()
        for seed in ("1", "2")
    }
