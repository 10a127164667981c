"""Recorded runs of engines whose replicas are other servers, alone or with a set of own workers beside them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from eventlm.bus.log_writer import LogWriter
from eventlm.system.system import real_system
from tests.simulation import Simulation
from tests.workload import Chaos, Machine, draw_backends, draw_machine


def backends_of(seed: int) -> Machine:
    """A machine of other servers. Every third has a set of own workers behind it, every third one before it."""
    backends = draw_backends(random.Random(seed), seed)
    if not seed % 3:
        return backends
    own = draw_machine(random.Random(seed), seed)
    return backends._replace(others=(own,)) if seed % 3 == 1 else own._replace(others=(backends,))


def record_backends(folder: Path, seed: int, *, segment_bytes: int = 0, **options: Any) -> Path:
    """A random workload on such a machine, with all that may go wrong."""
    chaos = Chaos(recoveries=seed % 3)
    options = {"machine": backends_of(seed), "check_every": 0, "chaos": chaos} | options
    with LogWriter(real_system(), folder, f"backends-{seed}", segment_bytes=segment_bytes) as writer:
        Simulation(seed, writer=writer, **options).run()
        return writer.run_folder
