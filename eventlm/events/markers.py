"""Markers: the header, digests to check a replay by, and notes. They change nothing in the state."""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct

from eventlm.config import CoreConfig
from eventlm.events.base import Marker

FORMAT_VERSION = 1
SCHEMA_VERSION = 6
#: Until the first release a change of behaviour bumps this number, and older traces are refused.
BEHAVIOUR_VERSION = 5


class PluginRecord(Struct, frozen=True, kw_only=True):
    """A plug-in as it ran: its spec (`type` and parameters), its version and a hash of what its source does."""

    kind: str
    name: str
    reference: str
    parameters: dict[str, Any] = {}
    version: str = ""
    source_hash: str = ""


class Header(Marker, frozen=True, kw_only=True, omit_defaults=False, tag="header"):
    """First line of a trace: what is needed to build the same core, and what is needed to understand the run.

    Its defaults are written out, unlike those of other events: a version left out because it is today's default
    would read as tomorrow's.
    """

    format: int = FORMAT_VERSION
    schema: int = SCHEMA_VERSION
    behaviour: int = BEHAVIOUR_VERSION
    #: Numbered changes of behaviour that this run had; empty until the first release.
    flags: list[int] = []
    run: str
    #: Unix time of the start in nanoseconds, as a string because JSON numbers end at 2^53.
    unix_start_ns: str
    code_version: str
    core: CoreConfig
    #: Resolved configuration with secrets as `***`, and its hash.
    config: dict[str, Any] = {}
    config_hash: str = ""
    plugins: list[PluginRecord]
    predictor: list[int]
    #: Seeds of the run's random streams, as strings.
    seeds: dict[str, str] = {}
    model_fingerprint: str = ""
    #: How many (content hash, integer) pairs the block name table keeps.
    block_table_size: int = 0
    host: dict[str, Any] = {}
    #: What is recorded beside the numbers: `default` or `tokens`.
    level: str = "default"
    #: In a later segment of one run: the last `h` of the segment before.
    previous_h: str = ""


class Checkpoint(Marker, frozen=True, kw_only=True, tag="checkpoint"):
    """Digest of each component of the state after the event before this one, 16 hex digits each."""

    digests: dict[str, str]


class Snapshot(Marker, frozen=True, kw_only=True, tag="snapshot"):
    """The core's whole state after the event before this one (see `eventlm.core.snapshot`), as it stands in the line.

    It follows the header of every segment of a run but the first, so that the segment verifies alone.
    """

    state: Raw


class Gap(Marker, frozen=True, kw_only=True, tag="gap"):
    """Events from `first` to `last` were not recorded. It follows the header of the segment that goes on after them."""

    first: int
    last: int
    reason: str


class UserMark(Marker, frozen=True, kw_only=True, tag="mark"):
    """A note by an operator."""

    text: str


class StepOps(Marker, frozen=True, kw_only=True, tag="ops"):
    """Nanoseconds that each operation of a completed step took in its worker. `c` is the completion."""

    replica: int
    epoch: int
    step: int
    ops: dict[str, int]


class End(Marker, frozen=True, kw_only=True, tag="end"):
    """A clean stop."""

    reason: str = "stop"
