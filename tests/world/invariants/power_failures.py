"""What a power failure leaves of a run's log. Recording does not sync, so any page and any name may be gone that the
kernel had not brought to the medium by itself. What comes before the first of them is there, and must verify.
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

#: Contents of the files of a run by their numbers, in the order in which they are read.
Files = dict[int, bytes]


def read_files(disk: WorldDisk, run_folder: Path) -> Files:
    """Those of a run, as they are now; none if it cannot be opened."""
    with contextlib.suppress(EventLMError), LogReader(run_folder, disk=disk.of("reader")) as reader:
        files = [disk.tree.find_file(path) for path in reader.segments]
        return {file.number: bytes(file.content) for file in files}
    return {}


def num_lines_left(before: Files, after: Files) -> int:
    """How many lines of a run can be read up to the first that a power failure has taken."""
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
    """Whether a file is as it was, up to where it ends now, and has its first line."""
    return before.startswith(after) and b"\n" in after


def verify_left(disk: WorldDisk, path: Path) -> int:
    """How many lines there are before the first that cannot be read; all of them are verified. Raises Found."""
    num_lines = 0
    with contextlib.suppress(EventLMError), LogReader(path, disk=disk.of("reader")) as reader:
        verifier = Verifier(rebuild(reader.header), reader.header)
        for num_lines, line in enumerate(reader, 1):  # noqa: B007
            verifier.feed(line)
    return num_lines
