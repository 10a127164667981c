from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.engine.admin import ReplicaStatus
from tests.server.conftest import RunningServer


def test_props(server: RunningServer) -> None:
    props = server.request("GET", "/props").json()
    settings = props.pop("default_generation_settings")
    assert settings["n_ctx"] == 256
    assert settings["params"]["temperature"] == 1.0
    assert "<|im_start|>" in props.pop("chat_template")
    assert props.pop("build_info").startswith("eventlm-")
    assert props == {
        "total_slots": 256,
        "model_alias": "test",
        "model_path": "test",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "modalities": {"vision": False, "audio": False},
        "is_sleeping": False,
    }


@pytest.mark.parametrize(("running", "status"), [((0, 0), 200), ((1, 2), 200), ((2, 2), 503), ((3, 2), 503)])
def test_slots(server: RunningServer, monkeypatch: pytest.MonkeyPatch, running: tuple[int, int], status: int) -> None:
    administer = server.engine.administer

    async def with_replicas(action: Any) -> Any:
        replicas = [
            ReplicaStatus(
                replica=number, up=True, epoch=0, num_running=num_running, num_steps_in_flight=0, num_blocks=8,
                num_held_blocks=0, num_cached_blocks=0,
            )
            for number, num_running in enumerate(running)
        ]  # fmt: skip
        return structs.replace(await administer(action), replicas=replicas)

    monkeypatch.setattr(server.engine, "administer", with_replicas)
    server.context.num_slots = 4
    slots = server.request("GET", "/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert sum(slot["is_processing"] for slot in slots) == min(sum(running), 4)
    assert {(slot["n_ctx"], slot["speculative"]) for slot in slots} == {(256, False)}
    reply = server.request("GET", "/slots?fail_on_no_slot=1")
    assert reply.status == status


def test_there_are_no_adapters(server: RunningServer) -> None:
    assert server.request("GET", "/lora-adapters").json() == []


@pytest.mark.parametrize("path", ["/props", "/slots", "/lora-adapters"])
def test_a_key_is_needed(start_server: Any, path: str) -> None:
    assert start_server(api_key="secret").request("GET", path).status == 401
