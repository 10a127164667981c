"""What travels between the engine, its driver process of Ray and the actors of ranks, as msgpack."""

from __future__ import annotations

from typing import Union

import msgspec
from msgspec import Struct

from eventlm.launchers.ray.checkpoint import CheckpointName
from eventlm.launchers.ray.placement import Bundle, NodeRoom, Strategy

#: In the arguments of a process.
PARENT = "{parent}"


class Connect(Struct, frozen=True, kw_only=True, tag="connect"):
    """Join the cluster at this address; answered with `Connected` or `Refused`."""

    address: str


class PlaceReplica(Struct, frozen=True, kw_only=True, tag="place"):
    """Find room for a replica, unless it still has it, and say where it is; answered with `Placed` or `Refused`.

    timeout_s: how long it may wait for room before that is answered; it waits on until the next `PlaceReplica` or
    `GiveUpRoom`. model, tokenizer: to be looked up on each host; None: there is none.
    """

    replica: int
    bundles: list[Bundle]
    strategy: Strategy
    timeout_s: int
    model: CheckpointName | None = None
    tokenizer: CheckpointName | None = None


class StartRank(Struct, frozen=True, kw_only=True, tag="start"):
    """Start the process of a rank of a placed replica; answered with `Started`, `Said` and in the end `RankEnded`.

    run: tells the processes of a rank apart. arguments: `PARENT` stands for the process id of the actor. environment:
    beside that of the actor, whose values it overrides; keys are among them. defaults: variables that it gets where the
    actor has none of that name.
    """

    replica: int
    rank: int
    run: int
    module: str
    arguments: list[str]
    environment: dict[str, str] = {}
    defaults: dict[str, str] = {}


class KillRank(Struct, frozen=True, kw_only=True, tag="kill"):
    """Kill the process of a rank, if it is still that of this run."""

    replica: int
    rank: int
    run: int


class GiveUpRoom(Struct, frozen=True, kw_only=True, tag="leave"):
    """Give up the room of a replica. What runs there ends."""

    replica: int


class HostFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank found on its host. node: Ray's id of that. version: of eventlm there. port: a free one. free_bytes:
    of memory, before ranks load anything. shared: a folder in memory of the ranks of its replica that are there, if
    there are several.

    model, tokenizer: their folders there, empty for none. problem: why it cannot run there.
    """

    host: str = ""
    address: str = ""
    node: str = ""
    version: str = ""
    port: int = 0
    free_bytes: int = 0
    shared: str = ""
    model: str = ""
    tokenizer: str = ""
    fingerprint: str = ""
    problem: str = ""


class Connected(Struct, frozen=True, kw_only=True, tag="connected"):
    """The cluster's nodes, and the address of this one among them."""

    address: str
    nodes: list[NodeRoom]


class Placed(Struct, frozen=True, kw_only=True, tag="placed"):
    """A replica has room: where each of its ranks is."""

    replica: int
    hosts: list[HostFacts]


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """What cannot be had, in words. replica: -1 for the cluster itself. no_room: it may be had another time."""

    message: str
    replica: int = -1
    no_room: bool = False


class Said(Struct, frozen=True, kw_only=True, tag="said"):
    """What the process of a rank has printed; empty: it has ended, and this is the last of it."""

    replica: int
    rank: int
    run: int
    output: bytes


class Started(Struct, frozen=True, kw_only=True, tag="started"):
    """The process of a rank runs, with this id on its host."""

    replica: int
    rank: int
    run: int
    pid: int


class RankEnded(Struct, frozen=True, kw_only=True, tag="ended"):
    """The process of a rank has ended. exit_code: negative for a signal. reason: if its actor or its node has gone."""

    replica: int
    rank: int
    run: int
    exit_code: int
    reason: str = ""


class LookUp(Struct, frozen=True, kw_only=True):
    """What an actor is to look up on its host; see `PlaceReplica`. num_sharing: make a folder in memory for those there
    of a replica of so many ranks; 0: make none.
    """

    num_sharing: int = 0
    model: CheckpointName | None = None
    tokenizer: CheckpointName | None = None


class News(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From an actor: what its process has printed since the last ones, and its exit status once it has ended. is_over:
    nothing more will come.
    """

    output: bytes = b""
    exit_code: int | None = None
    is_over: bool = False


ToDriver = Union[Connect, PlaceReplica, StartRank, KillRank, GiveUpRoom]  # noqa: UP007
FromDriver = Union[Connected, Placed, Refused, Started, Said, RankEnded]  # noqa: UP007

encode = msgspec.msgpack.Encoder().encode
decode_to_driver = msgspec.msgpack.Decoder(ToDriver).decode
decode_from_driver = msgspec.msgpack.Decoder(FromDriver).decode
