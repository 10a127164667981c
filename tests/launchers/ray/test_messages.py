"""What the engine, its driver of Ray and actors tell each other survives the way."""

from __future__ import annotations

import msgspec
import pytest

from eventlm.launchers.ray.checkpoint import CheckpointName
from eventlm.launchers.ray.messages import (
    Connect,
    Connected,
    FromDriver,
    GiveUpRoom,
    HostFacts,
    KillRank,
    Placed,
    PlaceReplica,
    RankEnded,
    Refused,
    Said,
    Started,
    StartRank,
    ToDriver,
    decode_from_driver,
    decode_to_driver,
    encode,
)
from eventlm.launchers.ray.placement import Bundle, NodeRoom

NAME = CheckpointName("hub", "models--a--b/snapshots/1")
RUN = {"replica": 1, "rank": 2, "run": 3}


@pytest.mark.parametrize(
    "message",
    [
        Connect(address="auto"),
        PlaceReplica(replica=1, bundles=[Bundle(2, 4)], strategy="spread", timeout_s=60, model=NAME),
        StartRank(**RUN, module="a.b", arguments=["{parent}"], environment={"KEY": "1"}, defaults={"OMP": "2"}),
        KillRank(**RUN),
        GiveUpRoom(replica=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_to_the_driver(message: ToDriver) -> None:
    assert decode_to_driver(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Connected(address="10.0.0.1", nodes=[NodeRoom("a", "10.0.0.1", 4, 2.5, 1, 0)]),
        Placed(replica=1, hosts=[HostFacts(host="a", address="10.0.0.1", port=7, fingerprint="ff")]),
        Refused(message="no room", replica=1, no_room=True),
        Started(**RUN, pid=4),
        Said(**RUN, output=b"\xff\n"),
        RankEnded(**RUN, exit_code=-9, reason="its node has died"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_from_the_driver(message: FromDriver) -> None:
    assert decode_from_driver(encode(message)) == message


def test_an_unknown_placement_is_no_message() -> None:
    place = PlaceReplica(replica=1, bundles=[], strategy="pack", timeout_s=1)
    with pytest.raises(msgspec.ValidationError):
        decode_to_driver(encode(place).replace(b"\xa4pack", b"\xa4heap"))
