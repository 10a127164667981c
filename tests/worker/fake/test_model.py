"""The fake worker in real time: one launch after the other, each as long as its formula says."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from msgspec import structs

from eventlm.core.shards import Layout
from eventlm.sampling_params import SamplingParams
from eventlm.system.clock import SystemClock
from eventlm.system.processes import SystemProcesses
from eventlm.system.shared_folder import StepBoard
from eventlm.worker.fake.model import FakeModel, fake_samples
from eventlm.worker.fake.tokens import FakeParameters, draw, fake_token
from eventlm.worker.protocol import FAKE_MODEL, Peers
from eventlm.worker.runner import PeerLostError
from tests.worker.launches import launched, new_sequence, payload
from tests.worker.test_loop import SETUP, SYSTEM


def test_launches_follow_each_other_on_the_device() -> None:
    model = FakeModel(SETUP, SYSTEM)
    new = new_sequence(1, [1, 2, 3], params=SamplingParams(seed=9, ignore_eos=True))
    first = model.start(launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=[(0, 0, [0, 1])]), payload(new))
    second = model.start(launched(1, decodes=[(1, 0, 4, 0)]), payload())
    assert second.times_ns[0] >= first.times_ns[1] > first.times_ns[0]
    assert [first.finish().tokens, second.finish().tokens] == [[[fake_token(9, 0, 0)]], [[fake_token(9, 0, 1)]]]
    assert model.describe() == (FAKE_MODEL, {"device": "none"})


def test_a_warm_up_gives_the_formula_s_values() -> None:
    parameters = FakeParameters(base_ns=5, prefill_token_ns=7, decode_ns=11, context_token_ns=13)
    assert [sample.duration_ns for sample in fake_samples(parameters)[:3]] == [
        5 + 7 + 13,
        5 + 256 * 7 + 256 * 13,
        5 + 11 + 64 * 13,
    ]
    # Of a pipeline that of each stage.
    model = FakeModel(structs.replace(SETUP, fake=parameters, layout=Layout(stages=2)), SYSTEM)
    assert model.warm_up()[1].duration_ns == (5 + 256 * 7 + 256 * 13) // 2


class StillClock(SystemClock):
    """Stands still unless the test moves it."""

    now_ns = 7

    def monotonic_ns(self) -> int:
        return self.now_ns


def test_a_step_that_comes_while_one_is_under_way_begins_when_that_ends() -> None:
    """On the fake device."""
    clock = StillClock()
    model = FakeModel(SETUP, SYSTEM._replace(clock=clock))
    new = payload(new_sequence(1, [1, 2]))
    first = model.start(launched(0, chunks=[(1, 0, 0, 2, 1)], blocks=[(0, 0, [5])]), new)
    clock.now_ns = 100
    second = model.start(launched(1, decodes=[(1, 0, 2, 1)]), payload())
    assert (first.times_ns, second.times_ns) == ((7, 307), (307, 607))
    assert (first.due_ns, second.due_ns) == (307, 607)
    assert not first.is_done()
    clock.now_ns = 307
    assert first.is_done()
    assert not second.is_done()
    clock.now_ns = 1000
    third = model.start(launched(2, decodes=[(1, 0, 2, 2)]), payload())
    assert second.is_done()
    assert third.times_ns == (1000, 1300)


def test_operations_are_those_of_the_last_stage() -> None:
    """It has the rank that answers."""
    setup = structs.replace(SETUP, layout=Layout(stages=2), rank=1, profile_ops=True)
    new = payload(new_sequence(1, [1, 2, 3]))
    step = FakeModel(setup, SYSTEM).start(launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=[(0, 0, [0, 1])]), new).finish()
    (_, first_end_ns), (start_ns, end_ns) = step.stages
    assert start_ns == first_end_ns
    assert sum(step.ops.values()) == end_ns - start_ns > 0


RANKS = structs.replace(SETUP, layout=Layout(tensor=8))


def struck_by(name: str, step: int) -> tuple[int, int]:
    """The rank that a fault strikes in a step, and one that notices it."""
    where = (name, SETUP.epoch, 0, step)
    struck = draw("rank", *where) % 8
    return struck, next(each for each in range(8) if each != struck and draw("notice", *where, each) % 2)


def test_a_fault_of_another_rank_is_noticed_once_it_has_come_there(tmp_path: Path) -> None:
    board = StepBoard(tmp_path, size=8)
    struck, rank = struck_by("raise", 5)
    fake, peers = FakeParameters(raise_ppm=1_000_000), Peers(shared_memory=str(tmp_path))
    model = FakeModel(structs.replace(RANKS, fake=fake, peers=peers, rank=rank), SYSTEM)
    step = model.start(launched(5), payload())
    # What comes behind it waits for the same.
    assert model.start(launched(6), payload()) is step
    for has_come in range(5):
        board.write(struck, has_come)
        assert not step.is_done()
    assert model.waits_for_peers
    board.write(struck, 5)
    assert step.is_done()
    with pytest.raises(PeerLostError):
        step.finish()


@pytest.mark.parametrize("is_struck", [True, False])
def test_a_step_that_hangs_never_ends(is_struck: bool) -> None:
    clock = StillClock()
    struck, other = struck_by("hang", 0)
    setup = structs.replace(RANKS, fake=FakeParameters(hang_ppm=1_000_000), rank=struck if is_struck else other)
    model = FakeModel(setup, SYSTEM._replace(clock=clock))
    step = model.start(launched(0), payload())
    for _ in range(5):
        clock.now_ns += 10**12
        assert not step.is_done()
        assert step.due_ns > clock.now_ns
    assert model.waits_for_peers is not is_struck


class Exit(Exception):
    """In place of the end of a process."""


def test_one_that_dies_ends_its_process() -> None:
    class Ending(SystemProcesses):
        def exit(self, status: int, line: str = "") -> NoReturn:
            raise Exit(f"{status}: {line}")

    setup = structs.replace(SETUP, fake=FakeParameters(die_ppm=1_000_000))
    with pytest.raises(Exit, match=r"^1: fake worker: drawn to die in step 3$"):
        FakeModel(setup, SYSTEM._replace(processes=Ending())).start(launched(3), payload())
