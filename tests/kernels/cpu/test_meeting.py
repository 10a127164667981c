"""Members of a group that meet: in threads that a sanitizer watches, in processes, and over another transport."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eventlm.kernels.cpu.meeting import (
    CarriedMeeting,
    Meeting,
    PeerGroup,
    create_segment,
    slot_bytes_for,
)
from eventlm.kernels.cpu.native import MeetingEndedError, available_builds
from tests.kernels.cpu.test_team import ROOT, run

pytestmark = pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")

#: Members add up what all of them wrote, in threads of one process. Racing, they use one set of slots.
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "meeting.h"

using namespace eventlm;

constexpr int kMeetings = 400, kNumbers = 50;

int main(int, char** arguments) {
  const int size = std::atoi(arguments[1]), is_racing = std::atoi(arguments[2]), spin_ns = std::atoi(arguments[3]);
  const std::size_t slot_bytes = kNumbers * 4, num_bytes = SharedMeeting::segment_bytes(size, slot_bytes);
  char* memory = static_cast<char*>(std::aligned_alloc(4096, num_bytes));
  std::fill_n(memory, num_bytes, 0);
  std::vector<int> racing(size * kNumbers);
  std::atomic<int> num_wrong = 0;
  std::vector<std::thread> threads;
  for (int number = 0; number < size; number++) {
    threads.emplace_back([&, number] {
      SharedMeeting meeting(memory, size, number, slot_bytes, spin_ns);
      for (int round = 0; round < kMeetings; round++) {
        int* mine = is_racing ? &racing[number * kNumbers] : reinterpret_cast<int*>(meeting.mine());
        for (int i = 0; i < kNumbers; i++) mine[i] = round * 1000 + number;
        if (round % 37 == number) std::this_thread::sleep_for(std::chrono::microseconds(300));
        if (meeting.meet(slot_bytes) != Met::all) num_wrong++;
        for (int member = 0; member < size; member++) {
          const int* part = is_racing ? &racing[member * kNumbers] : reinterpret_cast<const int*>(meeting.part(member));
          for (int i = 0; i < kNumbers; i++) num_wrong += part[i] != round * 1000 + member && !is_racing;
        }
      }
      if (meeting.num_meetings() != kMeetings) num_wrong++;
    });
  }
  for (auto& thread : threads) thread.join();
  std::printf("%d wrong\\n", num_wrong.load());
  return num_wrong > 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("meeting")
    (folder / "main.cpp").write_text(PROGRAM)
    sources = [str(folder / "main.cpp"), str(ROOT / "kernels/cpu/meeting.cpp")]
    command = [compiler, "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{ROOT / 'kernels/cpu'}"]
    built = subprocess.run(
        [*command, *sources, "-o", str(folder / "meeting")], capture_output=True, text=True, check=False
    )
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("no compiler with sanitizers")
    assert built.returncode == 0, built.stderr
    return folder / "meeting"


@pytest.mark.parametrize(("size", "spin_ns"), [(1, 0), (2, 50_000), (5, 0), (3, 50_000)])
def test_each_reads_what_all_wrote(program: Path, size: int, spin_ns: int) -> None:
    done = run(program, str(size), "0", str(spin_ns))
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_races_are_seen(program: Path) -> None:
    assert "WARNING: ThreadSanitizer: data race" in run(program, "3", "1", "0").stderr


def at(folder: Path, size: int, slot_bytes: int = 256) -> Path:
    path = folder / "segment"
    create_segment(path, size=size, slot_bytes=slot_bytes)
    return path


def shared(path: Path, size: int, number: int, slot_bytes: int = 256) -> Meeting:
    return Meeting(path, size=size, number=number, slot_bytes=slot_bytes)


def carried(size: int, slot_bytes: int = 256) -> list[CarriedMeeting]:
    """All members of a group in this process, one thread each."""
    barrier = threading.Barrier(size, timeout=60)
    brought: list[Tensor] = [torch.empty(0)] * size

    def member(number: int) -> CarriedMeeting:
        def carry(mine: Tensor, everything: Tensor) -> None:
            brought[number] = mine
            barrier.wait()
            torch.stack(brought, out=everything)
            barrier.wait()

        return CarriedMeeting(carry, size=size, number=number, slot_bytes=slot_bytes)

    return [member(number) for number in range(size)]


def tensors(number: int) -> list[Tensor]:
    """What a member brings to the meetings: all sizes, below and above a slot, dtypes, none."""
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(number)
    shapes = [(), (1,), (3, 5), (64,), (65,), (4, 33), (0, 7), *((rng.randrange(1, 300),) for _ in range(30))]
    dtypes = [torch.float32, torch.uint8, torch.int64, torch.bfloat16]
    return [
        torch.randint(0, 100, shape, generator=generator).to(dtypes[place % 4]) for place, shape in enumerate(shapes)
    ]


def gather_all(group: PeerGroup, *, most_sleep: float = 0.0) -> int:
    """How many of the meetings gave anything but what all members brought."""
    rng = random.Random(group.number)
    num_wrong = 0
    for mine, *others in zip(tensors(group.number), *(tensors(number) for number in range(group.size)), strict=True):
        time.sleep(rng.random() * most_sleep)
        num_wrong += not torch.equal(group.gather(mine), torch.stack(others))
        group.barrier()
    return num_wrong


def in_process(path: Path, number: int, pipe: Connection) -> None:
    """A member of three, which waits for a meeting to which not all come."""
    torch.set_num_threads(1)
    group = shared(path, 3, number)
    pipe.send(gather_all(group, most_sleep=0.002))
    try:
        group.barrier()
    except MeetingEndedError as error:
        pipe.send(str(error))


def test_processes_meet_until_one_has_died_and_another_left(tmp_path: Path) -> None:
    path = at(tmp_path, 3)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=in_process, args=(path, number, theirs), daemon=True)
        for number, (_, theirs) in enumerate(pipes, start=1)
    ]
    dying, waiting = (ours for ours, _ in pipes)
    try:
        for process in processes:
            process.start()
        group = shared(path, 3, 0)
        assert gather_all(group) == 0
        assert (dying.recv(), waiting.recv()) == (0, 0)
        processes[0].kill()
        processes[0].join()
        # By now it sleeps.
        assert not waiting.poll(0.1)
        group.leave()
        assert waiting.recv() == "a peer has left or failed"
        with pytest.raises(MeetingEndedError):
            group.barrier()
    finally:
        for process in processes:
            process.kill()
            process.join()


def in_threads(groups: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """What `work` gives or raises for each member."""

    def caught(group: Any) -> Any:
        try:
            return work(group)
        except MeetingEndedError as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(caught, groups))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["shared", "carried"])
def test_a_group_gathers(tmp_path: Path, size: int, kind: str) -> None:
    if kind == "shared":
        path = at(tmp_path, size)
        groups: list[Any] = [shared(path, size, number) for number in range(size)]
    else:
        groups = list(carried(size))
    assert in_threads(groups, gather_all) == [0] * size
    assert len({group.num_meetings for group in groups}) == 1
    # A gather of more than a slot takes several.
    assert groups[0].num_meetings > 2 * len(tensors(0))


def test_who_waits_for_whom_can_be_seen(tmp_path: Path) -> None:
    path = at(tmp_path, 2)
    groups = [shared(path, 2, number) for number in range(2)]
    in_threads(groups, lambda group: group.barrier())
    assert not any(group.is_waiting for group in groups)
    thread = threading.Thread(target=groups[1].barrier)
    thread.start()
    while not groups[1].is_waiting:
        time.sleep(0.001)
    assert not groups[0].is_waiting
    groups[0].barrier()
    thread.join()
    assert not any(group.is_waiting for group in groups)


def test_members_that_do_not_compute_the_same(tmp_path: Path) -> None:
    path = at(tmp_path, 2)
    groups = [shared(path, 2, number) for number in range(2)]
    found = in_threads(groups, lambda group: group.gather(torch.ones(1 + group.number)))
    assert {str(error) for error in found} == {"peers came to a meeting with different numbers of bytes"}
    assert isinstance(in_threads(groups, lambda group: group.barrier())[0], MeetingEndedError)


def test_what_the_transport_raises_is_the_reason() -> None:
    failure = ConnectionError("gone")

    def carry(_mine: Tensor, _everything: Tensor) -> None:
        raise failure

    group = CarriedMeeting(carry, size=2, number=0, slot_bytes=64)
    for _ in range(2):
        with pytest.raises(MeetingEndedError) as caught:
            group.gather(torch.ones(2))
        assert caught.value.__cause__ is failure
    group = CarriedMeeting(carry, size=2, number=0, slot_bytes=64)
    group.leave()
    with pytest.raises(MeetingEndedError) as caught:
        group.barrier()
    assert caught.value.__cause__ is None


def test_a_group_that_is_closed_has_ended_for_the_others(tmp_path: Path) -> None:
    path = at(tmp_path, 2)
    with shared(path, 2, 0) as first, shared(path, 2, 1) as second:
        assert in_threads([first, second], lambda group: group.barrier()) == [None, None]
        first.close()
        with pytest.raises(MeetingEndedError):
            second.barrier()


def test_what_is_no_segment_or_no_place_in_it(tmp_path: Path) -> None:
    path = at(tmp_path, 2)
    with pytest.raises(FileExistsError):
        create_segment(path, size=2, slot_bytes=256)
    with pytest.raises(FileNotFoundError):
        shared(tmp_path / "other", 2, 0)
    with pytest.raises(ValueError, match=r"has \d+ bytes, 3 members with slots of 256 need \d+"):
        shared(path, 3, 0)
    with pytest.raises(ValueError, match="member 2 of a group of 2"):
        shared(path, 2, 2)
    first = shared(path, 2, 0)
    with pytest.raises(ValueError, match="member 0 has been here before"):
        shared(path, 2, 0)
    first.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_slots_hold_the_rows_of_a_step() -> None:
    assert slot_bytes_for(1, 64) == 4 * (64 + 16)
    assert slot_bytes_for(10, 72) == 40 * (96 + 16)
