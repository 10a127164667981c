"""The words of the driver of Ray. What it does is tested with a cluster, in `test_launcher.py`."""

from __future__ import annotations

import asyncio
import threading

import pytest
from msgspec import structs

from eventlm.launchers.ray import driver
from eventlm.launchers.ray.driver import Driver, folder_makers, in_one_line, mismatch
from eventlm.launchers.ray.messages import GiveUpRoom, HostFacts, PlaceReplica, encode
from eventlm.launchers.ray.placement import Bundle
from tests.processes import PATIENCE_SECONDS, until

HERE = HostFacts(host="here", version="1.0", model="/a/model", fingerprint="aa")
THERE = HostFacts(host="there", address="10.0.0.2", version="1.0", model="/b/model", fingerprint="aa")


def test_a_host_with_the_same_can_be_used() -> None:
    assert mismatch(HERE, THERE) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"version": "0.9", "problem": "there is no /a/model"},
            "there (10.0.0.2) has eventlm 0.9, and the engine is 1.0; install the same on both",
        ),
        ({"problem": "there is no /a/model"}, "there (10.0.0.2) cannot use the model: there is no /a/model"),
        (
            {"fingerprint": "bb"},
            "there (10.0.0.2) has another checkpoint in /b/model: its fingerprint is bb, and that of /a/model on the "
            "engine's host is aa; copy the same files to both",
        ),
    ],
    ids=["version", "none", "other"],
)
def test_what_is_wrong_with_a_host_is_one_line_with_both_values(changes: dict[str, str], message: str) -> None:
    assert mismatch(HERE, structs.replace(THERE, **changes)) == message


def test_one_rank_of_each_node_that_has_several_makes_their_folder() -> None:
    assert folder_makers(["a", "b", "a", "c", "b", "a"]) == {"a": 0, "b": 1}
    assert folder_makers(["a", "b"]) == {}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: RankActor\n"
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
            "its worker process has died",
        ),
        ("The actor is dead because its node has died. Node Id: 1234", "its node has died"),
        ("Version mismatch:\n    Ray: 2.50.0", "Version mismatch: Ray: 2.50.0"),
        ("", "RuntimeError"),
    ],
)
def test_of_what_ray_says_one_line_is_enough(text: str, line: str) -> None:
    assert in_one_line(RuntimeError(text)) == line


async def test_room_that_is_given_up_while_ray_is_asked_for_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    begins, may_end = threading.Event(), threading.Event()
    given_back: list[str] = []

    def ask(bundles: list[dict[str, int]], strategy: str) -> str:
        begins.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return "room"

    monkeypatch.setattr(driver, "placement_group", ask)
    monkeypatch.setattr(driver, "remove_placement_group", given_back.append)
    served = Driver()
    served._take(encode(PlaceReplica(replica=0, bundles=[Bundle(1, 1)], strategy="pack", timeout_s=1)))
    await until(begins.is_set)
    served._take(encode(GiveUpRoom(replica=0)))
    await asyncio.sleep(0)
    may_end.set()
    await until(lambda: given_back == ["room"])
    assert not served._groups
