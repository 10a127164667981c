"""Opens the index of a run: kept from an earlier time, or made now."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import structs

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.errors import EventLMError, TraceCorruptError, UsageError
from eventlm.events import Header
from eventlm.replay.index.cache import IndexKey, index_key, keep, read_cached
from eventlm.replay.index.file import IndexContent, IndexFacts
from eventlm.replay.index.index import Index
from eventlm.replay.index.indexer import Indexer
from eventlm.replay.index.segments import index_segments
from eventlm.replay.rebuild import Changes, Rebuilt, rebuild
from eventlm.replay.verify.divergence_error import DivergenceError
from eventlm.replay.verify.verifier import Found, Verifier
from eventlm.types import OnProgress

#: Smaller runs are indexed in this process.
_PARALLEL_BYTES = 32 * 1024 * 1024
_NOT_ASKED = "the run was not verified (--no-verify), so there are no states, and of blocks only those held are known"


def open_index(
    path: Path | str,
    *,
    verify: bool = True,
    trust_local_plugins: bool = False,
    partial: bool = False,
    num_jobs: int = 0,
    on_progress: OnProgress | None = None,
) -> Index:
    """The index of a trace, a file or the folder of a run.

    verify: replay the run. Without, or where its plug-ins cannot be loaded, the index is made from the log alone, and
    `facts.missing` says what it lacks and why. partial: of a damaged trace take what precedes the damage.
    num_jobs: processes for the segments; 0: one for each core of this machine, if the run is large.

    Raises DivergenceError if the run diverges from its replay, and as LogReader does.
    """
    with LogReader(path) as reader:
        header = reader.header
        rebuilt, missing = rebuild_or_say_why(header, verify=verify, trust_local_plugins=trust_local_plugins)
        plugins = [] if rebuilt is None else [record.source_hash for record in header.plugins] + rebuilt.drift
        key = None
        content = None
        if not reader.still_being_written:
            key = _key(reader, is_verified=rebuilt is not None, plugins=plugins)
            content = None if key is None else read_cached(key)
        if content is None:
            jobs = min(num_jobs or _num_jobs(reader.size_bytes), reader.num_segments)
            jobs = 1 if partial or rebuilt is None else jobs
            content = (
                _join(reader, rebuilt, jobs, trust_local_plugins=trust_local_plugins, on_progress=on_progress)
                if jobs > 1
                else None
            )
            if content is None:
                run = RunIndexer(reader.path, header, rebuilt, missing)
                run.read(reader, partial=partial, on_progress=on_progress)
                content = run.content()
            if key is not None and not content.facts.damage:
                keep(key, content)
        return Index(reader.path, header, content, rebuilt)


def rebuild_or_say_why(header: Header, *, verify: bool, trust_local_plugins: bool) -> tuple[Rebuilt | None, str]:
    """How to make a run's core; or None, and what is missing without it and why."""
    if not verify:
        return None, _NOT_ASKED
    try:
        return rebuild(header, Changes(trust_local_plugins=trust_local_plugins)), ""
    except UsageError as error:
        return None, f"the run was not verified, so there are no states: {error}"


def _key(reader: LogReader, *, is_verified: bool, plugins: list[str]) -> IndexKey | None:
    """None if the files cannot be read twice; then reading them says what is wrong."""
    try:
        return index_key(reader.path, reader.segments, is_verified=is_verified, plugins=plugins)
    except OSError:
        return None


def _num_jobs(num_bytes: int) -> int:
    """The start of a process takes longer than a small run."""
    return len(os.sched_getaffinity(0)) if num_bytes >= _PARALLEL_BYTES else 1


def _join(
    reader: LogReader,
    rebuilt: Rebuilt | None,
    num_jobs: int,
    *,
    trust_local_plugins: bool,
    on_progress: OnProgress | None,
) -> IndexContent | None:
    """The index by several processes; None if the segments have to be read one after the other."""
    joined = index_segments(
        reader.segments, num_jobs=num_jobs, trust_local_plugins=trust_local_plugins, on_progress=on_progress
    )
    if joined is None:
        return None
    # The end of the log says how it ended.
    for _ in reader.lines_from(joined.end.next_s - 1):
        pass
    facts = IndexFacts(
        first_s=reader.header.s,
        next_s=joined.end.next_s,
        last_ns=joined.end.last_ns,
        last_h=joined.end.last_h,
        num_bytes=reader.size_bytes,
        is_verified=True,
        is_ended=not reader.still_being_written,
        warnings=_warnings(reader, rebuilt),
    )
    part = joined.part
    return IndexContent(facts=facts, names=part.names, tables=part.tables, snapshots=part.snapshots)


class RunIndexer:
    """Makes the index of a run from its first line on, and goes on while the run is being written.

    rebuilt: None: from the log alone; `missing` says why.
    """

    def __init__(self, path: str, header: Header, rebuilt: Rebuilt | None, missing: str = "") -> None:
        self._path = path
        self._rebuilt = rebuilt
        self._indexer = Indexer(header, None if rebuilt is None else Verifier(rebuilt, header))
        self._facts = IndexFacts(
            first_s=header.s,
            next_s=header.s,
            last_ns=header.ts,
            last_h="",
            num_bytes=0,
            is_verified=rebuilt is not None,
            missing=missing,
        )
        #: Why nothing more can be read: what follows a difference or damage would be read in a wrong state.
        self._failure: EventLMError | None = None

    def read_on(self) -> bool:
        """Take what was written since; returns whether there was anything. Raises as `read` does, and again then."""
        if self._failure is not None:
            raise self._failure
        with LogReader(self._path) as reader:
            before = self._indexer.next_s
            self.read(reader)
            return self._indexer.next_s > before

    def read(self, reader: LogReader, *, partial: bool = False, on_progress: OnProgress | None = None) -> None:
        """Take the lines of the log that have not been read yet. partial: up to the first damage, if there is any.

        Raises DivergenceError if the run diverges from its replay, and as LogReader does.
        """
        indexer = self._indexer
        line: LogLine | None = None
        damage = ""
        try:
            for line in reader.lines(on_progress, from_s=indexer.next_s):
                indexer.feed(line)
        except Found as found:
            assert line is not None
            drift = [] if self._rebuilt is None else self._rebuilt.drift
            consequence = "states would be wrong; --no-verify reads the log alone"
            self._failure = DivergenceError.at(reader.path, line, found, drift, consequence)
            raise self._failure from found
        except TraceCorruptError as error:
            if not partial or line is None:
                self._failure = error
                raise
            damage = str(error)
        self._facts = structs.replace(
            self._facts,
            next_s=indexer.next_s,
            last_ns=indexer.last_ns,
            last_h=self._facts.last_h if line is None else reader.last_h,
            num_bytes=reader.size_bytes,
            is_ended=not reader.still_being_written,
            damage=damage,
            warnings=[f"{damage}; what precedes is shown"] if damage else _warnings(reader, self._rebuilt),
        )

    def content(self) -> IndexContent:
        """The index of what has been read so far."""
        indexer = self._indexer
        return IndexContent(
            facts=self._facts,
            names=list(indexer.names.names),
            tables=indexer.tables(is_ended=self._facts.is_ended),
            snapshots=[*indexer.snapshots],
        )


def _warnings(reader: LogReader, rebuilt: Rebuilt | None) -> list[str]:
    return [*([] if rebuilt is None else rebuilt.drift), *reader.warnings()]
