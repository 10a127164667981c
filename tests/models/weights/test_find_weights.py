from __future__ import annotations

import subprocess
import sys


def test_nothing_heavy_is_imported() -> None:
    """The control plane asks."""
    program = (
        "import sys, eventlm.models.weights.find_weights; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
