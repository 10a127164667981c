"""The threads of the compiled forward pass, watched for accesses that race with each other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNKNOWN_MEMORY = "unexpected memory mapping"

#: Operations of which each needs the whole of the one before, by more threads than there are processors, some of which
#: come late or lose their processor within a piece. Memory of a call is gone when it returns.
PROGRAM = """
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "team.h"

using namespace eventlm;

constexpr std::size_t kSize = 40;

int main(int, char** arguments) {
  const int num_members = std::atoi(arguments[1]), is_racing = std::atoi(arguments[2]);
  Team team(num_members);
  for (int round = 0; round < 300; round++) {
    std::vector<Operation> operations(30);
    std::vector<long> values(kSize, 1), sums(kSize);
    int num_finished = 0;
    if (round % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // the others go to sleep
    team.run([&] {
      for (std::size_t number = 0; number < operations.size(); number++) {
        auto& from = number % 2 ? sums : values;
        auto& to = number % 2 ? values : sums;
        auto work = [&](std::size_t i) {
          if (i == 3 && number == static_cast<std::size_t>(round % 30)) {
            std::this_thread::sleep_for(std::chrono::microseconds(200));
          }
          to[is_racing ? 0 : i] = std::accumulate(from.begin(), from.end(), 0L) % 1000 + static_cast<long>(i);
        };
        operations[number].share(round % 11 == 0 ? 1 : kSize, 1 + round % 3, work, [&] { num_finished++; });
      }
    });
    if (num_finished != 30) return std::printf("%d operations finished\\n", num_finished), 1;
    std::vector<long> wanted(kSize, 1), next(kSize);
    for (int number = 0; number < 30; number++) {
      const long sum = std::accumulate(wanted.begin(), wanted.end(), 0L) % 1000;
      const std::size_t count = round % 11 == 0 ? 1 : kSize;
      for (std::size_t i = 0; i < count; i++) next[i] = sum + static_cast<long>(i);
      std::swap(wanted, next);
    }
    if (!is_racing && values != wanted) return std::printf("other values in round %d\\n", round), 1;
  }
}
"""

#: Threads are to be kept on a processor where there is no memory to say on which.
PIN_PROGRAM = """
#include <sched.h>

#include "team.h"

int num_asked = 0;

extern "C" cpu_set_t* __sched_cpualloc(size_t) noexcept { return ++num_asked, nullptr; }

int main() {
  eventlm::Team team(2);
  const int processors[] = {0, 0};
  team.pin(processors);
  return num_asked == 1 ? 0 : 3;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("team")
    (folder / "main.cpp").write_text(PROGRAM)
    sources = [str(folder / "main.cpp"), str(ROOT / "kernels/cpu/team.cpp")]
    command = [compiler, "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{ROOT / 'kernels/cpu'}"]
    built = subprocess.run(
        [*command, *sources, "-o", str(folder / "team")], capture_output=True, text=True, check=False
    )
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("no compiler with sanitizers")
    assert built.returncode == 0, built.stderr
    if UNKNOWN_MEMORY in run(folder / "team", "1", "0").stderr:
        pytest.skip("the sanitizer does not know this system's memory layout")
    return folder / "team"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Where memory lies is drawn anew each time, and the sanitizer ends a program before its start where it knows no
    such layout.
    """
    for _ in range(20):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        if UNKNOWN_MEMORY not in done.stderr:
            break
    return done


@pytest.mark.parametrize("num_members", [1, 2, 7])
def test_each_operation_has_all_of_the_one_before_it(program: Path, num_members: int) -> None:
    done = run(program, str(num_members), "0")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_races_are_seen(program: Path) -> None:
    done = run(program, "7", "1")
    assert done.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in done.stderr


@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="no compiler, or no processor sets")
def test_without_memory_to_say_where_threads_stay_unpinned(tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(PIN_PROGRAM)
    sources = [tmp_path / "main.cpp", ROOT / "kernels/cpu/team.cpp"]
    command = ["g++", "-std=c++20", "-pthread", f"-I{ROOT / 'kernels/cpu'}", *sources, "-o", tmp_path / "pin"]
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "pin"], check=False).returncode == 0
