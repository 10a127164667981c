"""Residual streams from stage to stage in shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventlm.worker.ranks.hand_over import HandedOver, SharedReceiver, SharedSender, header_bytes, pack_header
from eventlm.worker.runner import PeerLostError

SIZES: dict[str, Any] = {"num_slots": 3, "max_tokens": 5, "hidden_size": 7, "dtype": torch.float32}


def handed(step: int, num_tokens: int) -> HandedOver:
    times = ((step, step + 1), (step + 2, step + 3))
    return HandedOver(step, times, torch.full((num_tokens, 7), float(step)))


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def both(tmp_path: Path) -> tuple[SharedSender, SharedReceiver]:
    """The second of three stages, and the last."""
    receiver = SharedReceiver(tmp_path, "a", **SIZES, stage=1)
    return SharedSender(tmp_path, "a", **SIZES), receiver


def test_steps_come_out_as_they_went_in(both: tuple[SharedSender, SharedReceiver]) -> None:
    sender, receiver = both
    # The slots are used again and again.
    for first in range(0, 12, 3):
        given = [handed(first + number, number + 2) for number in range(3)]
        for each in given:
            sender.send(each)
        for each in given:
            assert receiver.wait(0)
            found = receiver.take()
            assert found[:2] == each[:2]
            assert torch.equal(found.residual_TH, each.residual_TH)
    assert not receiver.wait(0)


def test_what_was_taken_stays_when_its_slot_is_used_again(both: tuple[SharedSender, SharedReceiver]) -> None:
    sender, receiver = both
    sender.send(handed(0, 1))
    found = receiver.take()
    for step in range(1, 4):
        sender.send(handed(step, 1))
    assert found.residual_TH.eq(0).all()


def test_a_step_too_many_waits_for_room(both: tuple[SharedSender, SharedReceiver]) -> None:
    sender, receiver = both
    for step in range(3):
        sender.send(handed(step, 1))
    thread = in_thread(lambda: sender.send(handed(3, 1)))
    thread.join(0.05)
    assert thread.is_alive()
    assert [receiver.take().step for _ in range(4)] == [0, 1, 2, 3]
    thread.join(5)
    assert not thread.is_alive()


def test_one_that_waits_is_woken(both: tuple[SharedSender, SharedReceiver]) -> None:
    sender, receiver = both
    sender.send(handed(0, 1))
    receiver.take()

    def send() -> None:
        time.sleep(0.05)
        sender.send(handed(1, 1))

    thread = in_thread(send)
    assert receiver.wait(30)
    assert receiver.take().step == 1
    thread.join()


def test_the_end_of_the_sender_is_seen_after_what_it_sent(both: tuple[SharedSender, SharedReceiver]) -> None:
    sender, receiver = both
    sender.send(handed(0, 1))
    sender.close()
    assert receiver.take().step == 0
    assert receiver.wait(30)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="stage before is gone"):
            receiver.take()


def test_the_end_of_the_receiver_is_seen(both: tuple[SharedSender, SharedReceiver]) -> None:
    sender, receiver = both
    receiver.close()
    with pytest.raises(PeerLostError, match="next stage is gone"):
        sender.send(handed(0, 1))


def test_the_end_of_a_receiver_that_leaves_no_room_is_seen(both: tuple[SharedSender, SharedReceiver]) -> None:
    sender, receiver = both
    for step in range(3):
        sender.send(handed(step, 1))
    found: list[Exception] = []

    def send() -> None:
        try:
            sender.send(handed(3, 1))
        except PeerLostError as error:
            found.append(error)

    thread = in_thread(send)
    receiver.close()
    thread.join(5)
    assert len(found) == 1


def test_they_wait_for_each_other_at_the_start(tmp_path: Path) -> None:
    senders: list[SharedSender] = []
    thread = in_thread(lambda: senders.append(SharedSender(tmp_path, "a", **SIZES)))
    time.sleep(0.05)
    assert not senders
    receiver = SharedReceiver(tmp_path, "a", **SIZES, stage=0)
    # Without a sender its pipe is at its end, which is no loss.
    assert not receiver.wait(0) or senders
    thread.join(5)
    times = ((5, 6),)
    senders[0].send(HandedOver(9, times, torch.zeros(2, 7)))
    assert receiver.take()[:2] == (9, times)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_headers_have_one_length_for_a_number_of_stages() -> None:
    assert len(pack_header(handed(1, 1))) == header_bytes(2)
