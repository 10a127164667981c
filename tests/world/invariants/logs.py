"""The logs of all runs of a world: what must hold for them after each death and each reboot, and at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eventlm.bus.log_reader import LogReader
from eventlm.bus.run_folder import LATEST_NAME, TRACE_NAME, closed_segments
from eventlm.errors import EventLMError
from eventlm.replay.verify.verifier import Found, VerifyResult, verify
from tests.world.invariants.log_watch import LogWatch, Sample
from tests.world.invariants.losses import ToldLosses
from tests.world.invariants.power_failures import (
    Files,
    ShownEvents,
    events_left,
    is_left,
    num_lines_left,
    read_files,
    verify_left,
)
from tests.world.invariants.privacy import Privacy
from tests.world.machine.disk_faults import DiskFaults
from tests.world.machine.process import SIGKILL
from tests.world.programs.server import RUNS, WorldServer

if TYPE_CHECKING:
    from tests.world.programs.client import Client
    from tests.world.run import Run

#: If a run has more segments, only this many of the last ones are verified alone.
_MOST_ALONE = 4


class Logs:
    """Checks the logs. num_told: how often the recorder has reported that it is losing events; is_lossy: whether it is
    losing events now.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._checks = run.checks
        self._disk = run.world.disk
        self._reader = self._disk.of("reader")
        self._watch = LogWatch(self._disk, run.checks)
        self._shown = ShownEvents(run.config.record, self._disk)
        self._num_lines = 0
        self._losses = ToldLosses(run.checks)
        self.num_told = 0
        #: Runs that ended before a power failure. For those that lost something to it: how many lines come before the
        #: loss, and which files lost more than their ends.
        self._rebooted: set[str] = set()
        self._num_left: dict[str, int] = {}
        self._damaged: set[Path] = set()
        self._rotten: set[Path] = set()
        #: How many lines each run had when everything pending was last brought to the medium.
        self._num_saved: dict[str, int] = {}
        self._num_changes_saved = 0

    @contextlib.contextmanager
    def _calm(self) -> Iterator[None]:
        """Turn off disk faults while something is read."""
        faults, self._disk.faults = self._disk.faults, DiskFaults()
        try:
            yield
        finally:
            self._disk.faults = faults

    def listen(self) -> None:
        """Read the log lines that are new since the last call."""
        lines = self._run.lines
        for line in lines[self._num_lines :]:
            if self._losses.hear(str(line.get("event", ""))):
                self.num_told += 1
                self._run.world.faults["events were lost"] += 1
            is_right = "wrong result" not in str(line.get("reason", ""))
            self._checks.check("workers answer what was launched", is_right, f"{line}")
        self._num_lines = len(lines)

    @property
    def is_lossy(self) -> bool:
        """Whether the last server is losing events now."""
        folder = self._run.server.run_folder
        return folder is not None and self._losses.of(folder.name).is_lossy

    def check_shown(self, client: Client) -> None:
        """Check that all that a client has been shown is in the log on the disk, which is written before anything is
        sent.

        There is one exception: while the request was under way, the recorder reported that it is losing events. It does
        so if the disk fails, and with `record_lag=gap` also if the disk is slow. The missing events are then in a
        `gap`, or past the end of the log if the server dies before it can write that.
        """
        self._read()
        self.listen()
        if client.was_rewound or self.is_lossy or self.num_told > client.num_told_before or client.came_in_outage:
            return
        for index, (num_tokens, has_ended) in client.shown().items():
            sample = Sample(str(client.visit.body["seed"]), index)
            found = self._watch.num_tokens.get(sample, 0)
            where = f"visit {client.visit.number}.{index}"
            self._checks.check(
                "nothing shown that the log lacks", num_tokens <= found, f"{where}: {num_tokens}, {found}"
            )
            is_in_log = not has_ended or sample in self._watch.finished
            self._checks.check("no end shown that the log lacks", is_in_log, where)
            place = self._watch.place_of(sample, num_tokens, has_ended=has_ended)
            if place is not None:
                self._shown.add(place.run, place.s, self._run.world.now_ns, num_told=self.num_told)

    def _read(self) -> None:
        """Read what was added to the logs, except those that a power failure may have damaged."""
        with self._calm():
            for server in self._run.servers:
                if server.run_folder is None:
                    continue
                if not server.process.is_dead:
                    # If it was there before a power failure, it goes on now.
                    self._rebooted.discard(server.run_folder.name)
                if server.run_folder.name not in self._rebooted:
                    self._watch.read(server.run_folder)

    def names(self) -> list[str]:
        """The names of all runs that have left a folder."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(name for name in self._reader.list(RUNS) if name != LATEST_NAME)
        return []

    def was_killed(self, name: str) -> bool:
        """The engine of this run has been killed, and another one may go on with it. Whether it was losing events."""
        self.listen()
        is_lossy = self._losses.of(name).is_lossy
        self._losses.was_killed(name)
        return is_lossy

    def go_on(self, name: str, first_s: int) -> None:
        """An engine has gone on with this run: what had been written from event `first_s` on is cut off."""
        self.listen()
        self._losses.go_on(name, first_s)
        self._shown.go_on(name, first_s)
        if name not in self._num_left:
            return
        with self._calm():
            num_lines = verify_left(self._disk, RUNS / name)
            if num_lines == len(self._lines(name)) and not self._rotten_in(name):
                # What was damaged has been cut off.
                del self._num_left[name]
            else:
                self._num_left[name] = min(self._num_left[name], num_lines)

    def check_dead(self, server: WorldServer) -> None:
        """Check that the log of a dead server verifies as far as it goes."""
        self._read()
        self.listen()
        if server.run_folder is not None:
            self._check_run(server.run_folder.name)

    def _check_run(self, name: str, *, check_invariants: bool = False) -> VerifyResult | None:
        """Verify what can be read of a run, and each segment from its own snapshot."""
        with self._calm():
            result = self._check_whole(name, check_invariants=check_invariants)
            self._check_alone(name, result)
            return result

    def _check_whole(self, name: str, *, check_invariants: bool) -> VerifyResult | None:
        folder = RUNS / name
        if name in self._num_left:
            self._check_left(name)
            return None
        try:
            result = verify(folder, check_invariants=check_invariants, disk=self._reader)
        except EventLMError as error:
            is_excused = bool(self._rotten_in(name)) or not self._has_line(folder)
            self._run.world.faults["rotten log"] += bool(self._rotten_in(name))
            self._checks.check("a log can be read", is_excused, f"{error}")
            return None
        self._checks.check("bit rot is found", not self._rotten_in(name), f"{self._rotten_in(name)}")
        self._checks.check("the log verifies", result.divergence is None, f"{result.divergence}")
        self._losses.check_gaps(name, result.warnings, was_killed=self._was_killed(name), first_s=result.first_s)
        return result

    def _check_left(self, name: str) -> None:
        """Check what a power failure has left of a run."""
        try:
            num_lines = verify_left(self._disk, RUNS / name)
        except Found as found:
            self._checks.check("the log verifies", False, f"{name}: {found}")
            return
        wanted = 0 if self._rotten_in(name) else self._num_left[name]
        self._checks.check("a reboot leaves what comes first", num_lines >= wanted, f"{name}: {num_lines} of {wanted}")

    def _was_killed(self, name: str) -> bool:
        servers = [each for each in self._run.servers if each.run_folder is not None and each.run_folder.name == name]
        return not servers or servers[0].process.returncode == -SIGKILL

    def _check_alone(self, name: str, whole: VerifyResult | None) -> None:
        with contextlib.suppress(FileNotFoundError):
            paths = [segment.path for segment in closed_segments(RUNS / name, self._reader)]
            last = self._reader.status(RUNS / name / TRACE_NAME)
            # A server that dies while it begins a segment leaves two names for the last one, and a power failure may
            # remove either of them.
            paths = [path for path in paths if self._reader.status(path) != last]
            paths += [RUNS / name / TRACE_NAME] if last is not None else []
            if len(paths) < 2:
                return
            num_decisions = 0
            for path in paths[-_MOST_ALONE:]:
                try:
                    result = verify(path, disk=self._reader)
                except EventLMError as error:
                    is_excused = path in self._damaged or path in self._rotten
                    self._checks.check("a segment can be read alone", is_excused, f"{error}")
                    continue
                num_decisions += result.num_decisions
                self._checks.check("segments verify alone", result.divergence is None, f"{path}: {result.divergence}")
            if whole is not None and len(paths) <= _MOST_ALONE and not whole.num_missing:
                self._checks.check(
                    "segments are the whole", num_decisions == whole.num_decisions, f"{num_decisions} of {whole}"
                )

    def _rotten_in(self, name: str) -> list[Path]:
        """The files of a run that have bit rot, without those that were removed to make room."""
        return [path for path in sorted(self._rotten) if path.parent.name == name and self._reader.status(path)]

    def _has_line(self, folder: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return b"\n" in self._disk.tree.find_file(folder / TRACE_NAME).content
        return False

    def _lines(self, name: str) -> dict[int, bytes]:
        """The body of each line by its `s`, up to the first line that cannot be read."""
        found: dict[int, bytes] = {}
        with contextlib.suppress(EventLMError), LogReader(RUNS / name, disk=self._reader) as reader:
            for line in reader:
                found[line.s] = line.body
        return found

    def write_back(self) -> None:
        """Bring everything pending to the medium, as kernels do every so often."""
        self.listen()
        if self._disk.num_changes == self._num_changes_saved:
            return
        self._num_changes_saved = self._disk.num_changes
        self._read()
        self._disk.write_back()
        if self._run.world.faults["error of sync"]:
            # Pages whose sync has failed count as clean, and never reach the medium.
            self._num_saved.clear()
            return
        # Everything in older logs was saved before.
        for server in self._run.servers:
            if server.run_folder is not None:
                self._num_saved[server.run_folder.name] = self._num_lines_of_one(server.run_folder.name)

    def _num_lines_of_one(self, name: str) -> int:
        """How many lines a run has; 0 if it has several segments: a reboot may remove a segment that has a new name."""
        with self._calm(), contextlib.suppress(FileNotFoundError):
            if not closed_segments(RUNS / name, self._reader):
                return self._disk.tree.find_file(RUNS / name / TRACE_NAME).content.count(b"\n")
        return 0

    def reboot(self) -> None:
        """Cause a power failure. It may remove parts of the logs, but what is left must be unchanged."""
        with self._calm():
            self._read()
            names = self.names()
            lines = {name: self._lines(name) for name in names}
            num_lines = {name: self._num_lines_of_one(name) for name in names}
            files = {name: read_files(self._disk, RUNS / name) for name in names}
            self._rebooted |= {*names}
            holed = {*self._num_left} | {path.parent.name for path in self._rotten}
            to_stay = {name: self._events_to_stay(name, lines[name]) for name in names if name not in holed}
            self._disk.reboot()
            for name, events in to_stay.items():
                lost = sorted(events - events_left(self._disk, RUNS / name))
                self._checks.check(
                    "a reboot leaves what was synced", not lost, f"{name}: {lost[:5]}, {len(lost)} in all"
                )
            for name in names:
                self._see_left(name, files[name])
            for name in self.names():
                after = self._lines(name)
                # If a run has a hole or a rotten file, more of it can be read once a file is gone; and files that were
                # removed to make room may be back.
                unknown = None if name not in holed else b""
                first_s = min(lines[name], default=0)
                wrong = [
                    s for s, body in after.items() if s >= first_s and lines[name].get(s, unknown) not in (body, b"")
                ]
                self._checks.check("what a reboot leaves is as it was", not wrong, f"{name}: {wrong[:5]}")
                # An earlier power failure may have left a hole.
                num_saved = min(self._num_saved.get(name, 0), num_lines[name], len(lines[name]))
                self._checks.check("a reboot leaves what was saved", len(after) >= num_saved, f"{name}: {len(after)}")

    def _events_to_stay(self, name: str, lines: dict[int, bytes]) -> set[int]:
        """Those of these events that a power failure must leave now."""
        now_ns = self._run.world.now_ns
        server = self._run.server
        is_running = server.run_folder is not None and server.run_folder.name == name
        is_running = is_running and (not server.process.is_dead or server.process.ended_ns == now_ns)
        # A process that is dead syncs nothing more.
        hindered_until_ns = server.process.hindered_until_ns if is_running else now_ns
        last_s = self._shown.last_to_stay(name, now_ns, hindered_until_ns=hindered_until_ns, num_told=self.num_told)
        return {s for s in lines if s <= last_s}

    def _see_left(self, name: str, before: Files) -> None:
        folder = RUNS / name
        after = read_files(self._disk, folder)
        if [*after.items()] == [*before.items()]:
            return
        self._num_left.setdefault(name, num_lines_left(before, after))
        paths = [folder / TRACE_NAME]
        with contextlib.suppress(FileNotFoundError):
            paths += [segment.path for segment in closed_segments(folder, self._reader)]
        there = {path: self._disk.tree.find_file(path) for path in paths if self._reader.status(path)}
        left = {path for path, file in there.items() if is_left(before.get(file.number, b""), bytes(file.content))}
        self._damaged |= {*there} - left
        self._checks.check("a log can be read", bool(after) or left != {*paths}, f"{name} cannot be")

    def rot(self, detail: int) -> bool:
        """Flip a bit of a closed segment. False if there is none."""
        self._disk.write_back()
        with self._calm():
            closed = [segment.path for name in self.names() for segment in closed_segments(RUNS / name, self._reader)]
        # Just before a new segment begins, the last one has two names.
        last = [
            self._disk.tree.find_file(RUNS / name / TRACE_NAME) for name in self.names() if self._has_line(RUNS / name)
        ]
        closed = [path for path in closed if self._disk.tree.find_file(path) not in last and path not in self._rotten]
        if not closed:
            return False
        path = closed[detail % len(closed)]
        self._disk.tree.find_file(path).rot(detail * 7919)
        self._rotten.add(path)
        return True

    def check_end(self) -> int:
        """Check the logs of all runs. If the last server shut down cleanly, its log must have an end. Returns how many
        events there were.
        """
        self._read()
        self.listen()
        names = self.names()
        last = self._run.servers[-1]
        for name in names:
            is_last = last.run_folder is not None and name == last.run_folder.name
            result = self._check_run(name, check_invariants=is_last)
            if is_last and result is not None and last.process.returncode == 0:
                self._checks.check("the last log has its end", result.clean_end, f"{result.warnings}")
        if last.run_folder is not None and last.is_ready:
            pointed = self._reader.resolve(RUNS / LATEST_NAME).name
            self._checks.check("latest is the last run", pointed == last.run_folder.name, pointed)
        privacy = Privacy(self._run.clients, self._checks)
        for file in self._disk.tree.files():
            privacy.check("the log", bytes(file.content))
        for line in self._run.lines:
            privacy.check("what the server logs", repr(line).encode())
        if self._run.config.record.record_sync != "none" and last.process.returncode == 0:
            before, *_ = self._files_of(last), self._disk.reboot()
            self._checks.check("a run that has ended outlives a reboot", self._files_of(last) == before, "it does not")
        return self._watch.num_lines

    def _files_of(self, server: WorldServer) -> Files:
        return read_files(self._disk, server.run_folder) if server.run_folder is not None else {}
