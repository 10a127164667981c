"""A cell of a sweep: one simulation, with its description and result in JSON, so that any process can run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import xxhash
from msgspec import Struct

import eventlm
from eventlm._version import __version__
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.events.markers import BEHAVIOUR_VERSION
from eventlm.replay.cost.files import FileCost
from eventlm.replay.simulate.summary import SimulationSummary
from eventlm.system.whole_file import WholeFile

#: Packages that determine the result of a simulation; the hashes of plug-ins are in `CellSpec.plugin_hashes`.
_DECIDING_PACKAGES = ("core", "events", "config", "engine", "metrics", "replay")


class CellSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a simulation depends on. Equal specs give equal results.

    costs: by replicaset. options: of the engine's configuration, by name; among them policy, batcher, router,
    replicas, and how many ranks share a replica.
    load_ppm: factor on the workload's arrival rate, in parts per million.
    """

    workload: str
    workload_hash: str
    costs: dict[str, FileCost]
    options: dict[str, Any]
    load_ppm: int
    plugin_hashes: list[str]
    code: str

    @property
    def key(self) -> str:
        """16 hex digits that identify the simulation, independent of the workload's path."""
        same = msgspec.structs.replace(self, workload="")
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(same, order="deterministic"))

    @property
    def file_name(self) -> str:
        """A readable, unique name."""
        plugins = (format_plugin_spec(self.options[kind]) for kind in ("policy", "batcher", "router"))
        sizes = {"t": "tensor_parallel_size", "s": "pipeline_parallel_size", "k": "kv_parallel_size"}
        ranks = [f"{letter}{self.options[name]}" for letter, name in sizes.items() if self.options[name] > 1]
        words = [*plugins, f"r{self.options['replicas']}", *ranks, f"x{self.load_ppm / 1e6:g}"]
        slug = "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in word) for word in words)
        return f"{slug[:80]}-{self.key}.json"


class CellResult(Struct, frozen=True, kw_only=True):
    """A summary or an error."""

    summary: SimulationSummary | None = None
    error: str = ""


class FinishedCell(Struct, frozen=True, kw_only=True):
    """The content of a cell's file."""

    spec: CellSpec
    summary: SimulationSummary


def code_hash() -> str:
    """The version, and a hash of the sources that determine the result of a simulation."""
    found = xxhash.xxh3_64()
    package = Path(eventlm.__file__).parent
    for name in _DECIDING_PACKAGES:
        for path in sorted((package / name).rglob("*.py")):
            found.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return f"{__version__}-{BEHAVIOUR_VERSION}-{found.hexdigest()}"


def read_finished(folder: Path, spec: CellSpec) -> SimulationSummary | None:
    """The result of an earlier sweep for the same cell; None if it is missing or unreadable."""
    try:
        found = msgspec.json.decode((folder / spec.file_name).read_bytes(), type=FinishedCell)
    except (OSError, msgspec.DecodeError):
        return None
    return found.summary if found.spec.key == spec.key else None


def write_finished(folder: Path, spec: CellSpec, summary: SimulationSummary) -> None:
    """Write a result atomically. Raises OSError."""
    whole = WholeFile(folder / spec.file_name, mode=0o666)
    try:
        whole.file.write(msgspec.json.format(msgspec.json.encode(FinishedCell(spec=spec, summary=summary))) + b"\n")
        whole.finish()
    finally:
        whole.discard()
