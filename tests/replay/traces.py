"""Small recorded runs, and traces that somebody has meddled with while keeping the hash chain right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eventlm.bus.log_writer import LogWriter
from eventlm.config import CoreConfig
from eventlm.events.codec import chain, close_line, split_line
from eventlm.replay.verify.divergence import Divergence
from eventlm.replay.verify.verifier import VerifyResult
from eventlm.system.system import real_system
from eventlm.worker.fake.tokens import FakeParameters
from tests.simulation import Simulation
from tests.workload import POLICIES, Chaos, Machine

#: A trace as JSON objects without their hashes.
Objects = list[dict[str, Any]]

CALM = Chaos(cancels=0, kills=0, drops_if_late=0, grammars=0, text_ends=0.2, poison_ppm=0)


def small_machine(policy: dict[str, Any], **limits: Any) -> Machine:
    """One replica of 24 blocks of 4 tokens, unless said otherwise."""
    fields = {
        "block_size": 4,
        "num_blocks": 24,
        "max_model_len": 92,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
    }
    core = CoreConfig(models=["fake"], **(fields | limits))  # type: ignore[arg-type]
    others = [{"type": name} for name in POLICIES if name != policy["type"]]
    return Machine(core, [policy, *others], {"type": "fixed"}, {"type": "round_robin"}, FakeParameters())


def record(
    folder: Path, machine: Machine, *, seed: int = 1, chaos: Chaos = CALM, num_requests: int = 16, run: str = "run"
) -> Path:
    """Run a workload on a machine and record it in `folder`."""
    writer = LogWriter(real_system(), folder, run)
    Simulation(seed, num_requests=num_requests, chaos=chaos, machine=machine, writer=writer).run()
    return writer.path


def read_objects(path: Path) -> Objects:
    """The lines of a trace, or of a token log, as JSON objects."""
    found = []
    for line in path.read_bytes().splitlines():
        split = split_line(line)
        assert split is not None
        found.append(msgspec.json.decode(split.body + b"}"))
    return found


def write_objects(path: Path, objects: Sequence[dict[str, Any]]) -> Path:
    """Write objects as a trace whose `s` are gapless and whose hashes are right."""
    previous_h = ""
    lines = []
    for s, item in enumerate(objects):
        body = msgspec.json.encode(item | {"s": s} if s else item)[:-1]
        previous_h = chain(previous_h, body)
        lines.append(close_line(body, previous_h))
    path.write_bytes(b"".join(lines))
    return path


def tampered(source: Path, target: Path, change: Callable[[Objects], Any]) -> Path:
    """A copy of a trace in which something was changed by somebody who can compute hashes."""
    objects = read_objects(source)
    change(objects)
    return write_objects(target, objects)


def indices(objects: Objects, tag: str) -> list[int]:
    """Where events of a kind stand."""
    return [index for index, item in enumerate(objects) if item["t"] == tag]


def divergence_of(result: VerifyResult) -> Divergence:
    """The divergence of a verification that must have found one."""
    assert result.divergence is not None
    assert result.exit_code == result.divergence.exit_code
    return result.divergence


def another_block(objects: Objects) -> int:
    """Change a number of a block in the first launch that writes some; the place of that launch."""
    index = next(p for p in indices(objects, "launch") if "blocks" in objects[p])
    row = objects[index]["blocks"][0]
    row[2][0] = row[2][0] + 1
    return index
