"""What a power failure leaves of a run's log. Recording does not sync, so any page or name may be lost that the kernel
has not brought to the medium by itself. Everything before the first loss is there, and must verify.
"""

from __future__ import annotations

import contextlib
from itertools import takewhile
from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.errors import EventLMError
from eventlm.replay.rebuild import rebuild
from eventlm.replay.verify.verifier import Verifier
from tests.world.machine.disk import WorldDisk

#: The contents of a run's files, by file number, in reading order.
Files = dict[int, bytes]


def read_files(disk: WorldDisk, run_folder: Path) -> Files:
    """The files of a run as they are now; none if the run cannot be opened."""
    with contextlib.suppress(EventLMError), LogReader(run_folder, disk=disk.of("reader")) as reader:
        files = [disk.tree.find_file(path) for path in reader.segments]
        return {file.number: bytes(file.content) for file in files}
    return {}


def num_lines_left(before: Files, after: Files) -> int:
    """How many lines of a run can still be read, up to the first that a power failure has removed."""
    numbers, num_lines = [*before], 0
    for place, (number, content) in enumerate(after.items()):
        if number not in before or (place and numbers[numbers.index(number) - 1] != [*after][place - 1]):
            break
        lines = zip(before[number].split(b"\n")[:-1], content.split(b"\n")[:-1], strict=False)
        num_lines += len([*takewhile(lambda both: both[0] == both[1], lines)])
        if content != before[number]:
            break
    return num_lines


def is_left(before: bytes, after: bytes) -> bool:
    """Whether a file lost nothing but its end, and still has its first line."""
    return before.startswith(after) and b"\n" in after


def verify_left(disk: WorldDisk, path: Path) -> int:
    """Verify all lines before the first that cannot be read. Returns how many there are. Raises Found."""
    num_lines = 0
    with contextlib.suppress(EventLMError), LogReader(path, disk=disk.of("reader")) as reader:
        verifier = Verifier(rebuild(reader.header), reader.header)
        for num_lines, line in enumerate(reader, 1):  # noqa: B007
            verifier.feed(line)
    return num_lines
