"""Kept responses and responses in the background, with several front ends, deaths and restarts."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cli.conftest import StartServer
from tests.cli.test_front_ends import front_end_pids, num_up
from tests.processes import wait_until
from tests.serving import Server, fake_text

SLOW = ("--model", "fake", "--fake", "base_ns=20000000")
ENDED = ("completed", "incomplete", "failed", "cancelled")


class Clients:
    """A client for each call, over a connection of its own, which any front end may get."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stack = ExitStack()

    @property
    def any(self) -> Any:
        return self._stack.enter_context(self._server.client())

    def create(self, num_tokens: int, seed: int = 1, **fields: Any) -> Any:
        return self.any.responses.create(
            model=self._server.model,
            input="hi",
            max_output_tokens=num_tokens,
            extra_body={"seed": seed, "ignore_eos": True},
            **fields,
        )

    def until(self, id: str, *statuses: str) -> Any:
        """The response once it has one of these statuses."""
        return wait_until(lambda: found if (found := self.any.responses.retrieve(id)).status in statuses else None)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def clients() -> Iterator[list[Clients]]:
    made: list[Clients] = []
    yield made
    for each in made:
        each.close()


def test_every_front_end_knows_what_any_of_them_keeps(start_server: StartServer, clients: list[Clients]) -> None:
    server = start_server(*SLOW, "--api-servers", "2")
    clients.append(to := Clients(server))
    conversation = to.any.conversations.create(metadata={"a": "b"})
    ids = [to.create(4, seed).id for seed in range(4)]
    for _ in range(3):
        texts = [to.any.responses.retrieve(id).output_text for id in ids]
        assert texts == [fake_text(seed, 4) for seed in range(4)]
        assert to.any.conversations.retrieve(conversation.id).metadata == {"a": "b"}
    earlier = ids[0]
    for _ in range(4):
        earlier = to.create(2, previous_response_id=earlier, conversation=None).id
    assert len(to.any.responses.input_items.list(earlier, limit=100).data) == 9
    server.stop_and_verify()


def test_a_response_in_the_background_is_read_and_ended_anywhere(
    start_server: StartServer, clients: list[Clients]
) -> None:
    server = start_server(*SLOW, "--api-servers", "2")
    clients.append(to := Clients(server))
    begun = [to.create(20, seed, background=True) for seed in range(3)]
    endless = [to.create(4000, seed, background=True) for seed in range(3)]
    assert {response.status for response in begun} == {"queued"}
    streams = [list(to.any.responses.retrieve(response.id, stream=True)) for response in begun]
    for seed, events in enumerate(streams):
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == fake_text(seed, 20) == events[-1].response.output_text
        id = events[0].response.id
        # It was kept before its last event came.
        assert to.any.responses.retrieve(id) == events[-1].response
        rest = list(to.any.responses.retrieve(id, stream=True, starting_after=10))
        assert rest == events[11:]
    for response in endless:
        to.until(response.id, "in_progress")
        cancelled = to.any.responses.cancel(response.id)
        assert cancelled.status == "cancelled"
        assert to.any.responses.cancel(response.id) == cancelled == to.any.responses.retrieve(response.id)
    wait_until(lambda: server.figure("vllm:num_requests_running") == 0)
    trace = server.stop_and_verify()
    assert trace.finish_reasons == {"length": 3, "cancelled": 3}


def test_responses_of_a_front_end_that_dies_have_failed(start_server: StartServer, clients: list[Clients]) -> None:
    server = start_server(*SLOW, "--api-servers", "2")
    clients.append(to := Clients(server))
    conversations = [to.any.conversations.create().id for _ in range(2)]
    begun = [to.create(4000, background=True, conversation=conversation) for conversation in conversations]
    for response in begun:
        to.until(response.id, "in_progress")
    with pytest.raises(openai.BadRequestError, match="Another process"):
        to.create(4, conversation=conversations[0])
    for pid in front_end_pids(server):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(front_end_pids(server)) == 2 and num_up(server) == 2)
    for response, conversation in zip(begun, conversations, strict=True):
        failed = to.until(response.id, *ENDED)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        # Others go on with its conversation.
        assert to.create(4, conversation=conversation).status == "incomplete"
    wait_until(lambda: server.figure("vllm:num_requests_running") == 0)
    server.stop_and_verify()


@pytest.mark.parametrize("num_front_ends", ["0", pytest.param("2", marks=pytest.mark.soak)])
def test_what_is_in_a_file_outlives_the_server(
    start_server: StartServer, clients: list[Clients], tmp_path: Path, num_front_ends: str
) -> None:
    store = tmp_path / "responses.sqlite"
    flags = (*SLOW, "--api-servers", num_front_ends, "--response-store", str(store))
    server = start_server(*flags)
    clients.append(to := Clients(server))
    response = to.create(8)
    conversation = to.any.conversations.create(items=[{"role": "user", "content": "Hello"}])
    begun = to.create(4000, background=True, conversation=conversation.id)
    to.until(begun.id, "in_progress")
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    second = start_server(*flags, wait=False)
    assert second.process.wait(60) == 2
    assert "another server uses it" in second.stderr
    server.process.kill()
    server.process.wait(60)
    server = start_server(*flags)
    clients.append(to := Clients(server))
    assert to.any.responses.retrieve(response.id) == response
    assert to.any.responses.retrieve(begun.id).status == "failed"
    assert to.create(4, conversation=conversation.id).status == "incomplete"
    assert len(to.any.conversations.items.list(conversation.id).data) == 3
    assert to.create(4, previous_response_id=response.id).status == "incomplete"
    to.any.responses.delete(response.id)
    server.stop_and_verify()
    assert [each.name for each in tmp_path.glob("responses*")] == ["responses.sqlite"]


def test_a_drain_lets_a_response_in_the_background_end(
    start_server: StartServer, clients: list[Clients], tmp_path: Path
) -> None:
    flags = (*SLOW, "--response-store", str(tmp_path / "store"))
    server = start_server(*flags, "--api-servers", "2")
    clients.append(to := Clients(server))
    begun = to.create(60, background=True)
    server.stop_and_verify()
    assert server.log_event("shutting down")["num_requests"] == 1
    server = start_server(*flags)
    clients.append(to := Clients(server))
    assert to.any.responses.retrieve(begun.id).output_text == fake_text(1, 60)
    server.stop_and_verify()
