"""Ranks of the fake model: one is struck by a fault and the others feel it; early stages check what they are told."""

from __future__ import annotations

import pytest

from eventlm.core.shards import Layout
from eventlm.errors import EventLMError
from eventlm.worker.fake.rank import FakeNotice, FakeWait
from eventlm.worker.fake.runner import FakeDeath, FakeHang, FakeRunner
from eventlm.worker.protocol import StepPayload
from eventlm.worker.sequence_table import DesyncError
from tests.worker.launches import launched, new_sequence, payload

LAYOUT = Layout(tensor=2, stages=2)
FIRST = launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=[(0, 0, [0, 1])])
NEW = payload(new_sequence(1, [1, 2, 3]))


def ranks(**parameters: int) -> list[FakeRunner]:
    return [FakeRunner(parameters, epoch=1, block_size=4, num_blocks=64, layout=LAYOUT, rank=rank) for rank in range(4)]


@pytest.mark.parametrize(("name", "fault"), [("die", FakeDeath), ("raise", EventLMError), ("hang", FakeHang)])
def test_one_rank_is_struck_and_the_others_wait_or_notice(name: str, fault: type[Exception]) -> None:
    met = []
    for runner in ranks(**{f"{name}_ppm": 1_000_000}):
        with pytest.raises((FakeDeath, FakeHang, FakeWait, EventLMError)) as caught:
            runner.execute(FIRST, NEW)
        met.append(caught.type)
    assert met.count(fault) == 1
    others = {FakeWait} if name == "hang" else {FakeWait, FakeNotice}
    assert {each for each in met if each is not fault} <= others


def test_one_that_is_alone_is_always_struck() -> None:
    with pytest.raises(FakeDeath):
        FakeRunner({"die_ppm": 1_000_000}, epoch=1, block_size=4, num_blocks=64).execute(FIRST, NEW)


def test_early_stages_need_to_be_told() -> None:
    group = ranks()
    tokens = [runner.execute(FIRST, NEW).tokens for runner in group]
    assert all(each == tokens[0] for each in tokens)
    decode = launched(1, decodes=[(1, 0, 4, 0)])
    for runner in group[:2]:
        with pytest.raises(DesyncError, match="follows step 0, whose tokens are not here"):
            runner.execute(decode, payload())
    for runner in group[2:]:
        runner.execute(decode, payload())


def test_what_they_are_told_is_what_they_drew() -> None:
    group = ranks()
    for runner in group:
        tokens = runner.execute(FIRST, NEW).tokens
    decode = launched(1, decodes=[(1, 0, 4, 0)])
    group[0].execute(decode, StepPayload(results=[(0, tokens)]))
    with pytest.raises(DesyncError, match=r"step 0 gave \[\[3\]\], and here"):
        group[1].execute(decode, StepPayload(results=[(0, [[3]])]))


def test_a_sequence_that_comes_again_brings_its_history() -> None:
    runner = ranks()[0]
    tokens = runner.execute(FIRST, NEW).tokens
    again = launched(1, chunks=[(1, 0, 0, 4, 1)], blocks=[(0, 0, [2, 3])], forget=[(1, 0)])
    history = new_sequence(1, [1, 2, 3, *tokens[0]], num_prompt_tokens=3)
    runner.execute(again, payload(history))
