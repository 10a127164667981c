"""Markers: the header, digests to check a replay by, and notes. They change nothing in the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, structs

from eventlm.config import CoreConfig
from eventlm.config.core import MAX_NAME_LENGTH, Count
from eventlm.events.base import Marker
from eventlm.types import PluginKind

FORMAT_VERSION = 1
SCHEMA_VERSION = 10
#: Until the first release a change of behaviour bumps this number, and older traces are refused.
BEHAVIOUR_VERSION = 9

Text = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
#: Names the folder that a run is recorded in.
RunName = Annotated[str, Meta(pattern=r"^[^/\x00-\x1f\x7f]{1,255}\Z")]


class PluginRecord(Struct, frozen=True, kw_only=True):
    """A plug-in of the run: its spec (`type` and parameters), its version and a hash of its source code."""

    kind: PluginKind
    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    reference: Text
    parameters: dict[str, Any] = {}
    version: Text = ""
    source_hash: Text = ""


Coefficients = Annotated[list[Count], Meta(min_length=5, max_length=5)]


class ReplicasetRecord(Struct, frozen=True, kw_only=True):
    """A further replicaset of a run: what the header says of the first by the same names."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    core: CoreConfig
    plugins: list[PluginRecord]
    predictor: Coefficients
    model_fingerprint: Text = ""
    block_table_size: Count = 0
    #: What its workers compute with. The rest of the machine is in the header's.
    host: dict[str, Any] = {}


class Header(Marker, frozen=True, kw_only=True, omit_defaults=False, tag="header"):
    """First line of a trace: everything needed to build the same core, and to understand the run.

    Its defaults are written out, unlike those of other events: a version left out because it is today's default
    would read as tomorrow's.

    Readers use `eventlm.events.header_check`, which checks what types cannot express.
    """

    format: int = FORMAT_VERSION
    schema: int = SCHEMA_VERSION
    behaviour: int = BEHAVIOUR_VERSION
    #: Numbered changes of behaviour that this run had; empty until the first release.
    flags: list[Count] = []
    run: RunName
    #: Unix time of the start in nanoseconds, as a string because JSON numbers end at 2^53.
    unix_start_ns: Annotated[str, Meta(pattern=r"^-?[0-9]{1,19}\Z")]
    code_version: Text
    core: CoreConfig
    #: Resolved configuration with secrets as `***`, and its hash.
    config: dict[str, dict[str, Any]] = {}
    config_hash: Text = ""
    plugins: list[PluginRecord]
    predictor: Coefficients
    #: Seeds of the run's random streams, as strings.
    seeds: dict[str, Text] = {}
    model_fingerprint: Text = ""
    #: How many (content hash, integer) pairs the block name table keeps.
    block_table_size: Count = 0
    host: dict[str, Any] = {}
    #: What is recorded in addition to the numbers.
    level: Literal["default", "tokens"] = "default"
    #: In a later segment of one run: the last `h` of the segment before.
    previous_h: Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")] = ""
    #: Where there are several replicasets: the name of the first, which the fields above describe, and the others.
    replicaset: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)] | UnsetType = UNSET
    replicasets: Annotated[list[ReplicasetRecord], Meta(min_length=1)] | UnsetType = UNSET

    @property
    def sets(self) -> list[ReplicasetRecord]:
        """All replicasets in their order. One that is alone is named after its model."""
        first = ReplicasetRecord(
            name=self.core.models[0] if self.replicaset is UNSET else self.replicaset,
            core=self.core,
            plugins=self.plugins,
            predictor=self.predictor,
            model_fingerprint=self.model_fingerprint,
            block_table_size=self.block_table_size,
            host=self.host,
        )
        return [first, *(self.replicasets or [])]

    @property
    def model_names(self) -> list[str]:
        """The name of each replicaset's model, the first of those that it serves it by."""
        return [each.core.models[0] for each in self.sets]

    @property
    def num_replicas(self) -> int:
        """Of all replicasets."""
        return sum(each.core.num_replicas for each in self.sets)

    def with_sets(self, sets: Sequence[ReplicasetRecord]) -> Header:
        """The same with other contents of its replicasets."""
        first, *others = sets
        fields = {name: getattr(first, name) for name in ReplicasetRecord.__struct_fields__ if name != "name"}
        return structs.replace(self, **fields, replicasets=others or UNSET)

    def cores_of_replicas(self) -> list[CoreConfig]:
        """By its number, the configuration of each replica's set."""
        return [each.core for each in self.sets for _ in range(each.core.num_replicas)]

    def sets_of_replicas(self) -> list[int]:
        """By its number, which set each replica is of."""
        return [index for index, each in enumerate(self.sets) for _ in range(each.core.num_replicas)]


class Checkpoint(Marker, frozen=True, kw_only=True, tag="checkpoint"):
    """Digest of each component of the state after the event before this one, 16 hex digits each."""

    digests: dict[str, str]


class Snapshot(Marker, frozen=True, kw_only=True, tag="snapshot"):
    """The core's whole state after the event before this one (see `eventlm.core.state.snapshot`).

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
    """The run ended in order."""

    reason: str = "stop"
