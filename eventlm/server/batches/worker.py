"""Runs all batches of a folder: in exactly one process, one batch of each owner at a time, the oldest first.

What a batch has done is in its files, so it goes on where it was after a restart, of this process or of the server.
A full disk stops the batches, but nothing else, until there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import structlog
from msgspec import structs

from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import EventLMError
from eventlm.server.api import Api
from eventlm.server.auth.api_keys import Principal
from eventlm.server.batches.folder import BatchFolder, BatchRecord, FileRecord, OwnerFolder
from eventlm.server.batches.line_runner import BATCH_SCHEDULING, LineRunner
from eventlm.server.batches.lines import InputLine, LineError, OutputLine, read_lines, without_response
from eventlm.server.batches.objects import TERMINAL, BatchError, BatchErrors, BatchStatus, FileObject, RequestCounts
from eventlm.server.batches.results import Results
from eventlm.server.batches.window import Others, Window
from eventlm.server.context import ServerContext
from eventlm.system.disk import WritableFile
from eventlm.tasks import completed

_log = structlog.get_logger("eventlm.batches")

#: How often to look for what other processes have created and cancelled, or whether to take their place.
POLL_SECONDS = 0.5
#: How often to remove what has expired.
PURGE_SECONDS = 60.0
#: How often to try a disk again that takes nothing.
DISK_RETRY_SECONDS = 2.0
#: How often a batch's counts are written.
SAVE_SECONDS = 1.0
#: Most errors that a failed batch reports.
MAX_ERRORS = 100
_EXPIRED = "This line was not run: the batch's completion window expired."
T = TypeVar("T")


def apis_by_path(apis: dict[str, Api[Any]]) -> dict[str, Api[Any]]:
    """The APIs that batches may use, by the path that names each. Raises ValueError if a path names two."""
    found: dict[str, Api[Any]] = {}
    for api in apis.values():
        if api.path in found:
            raise ValueError(f"two APIs have the path {api.path}: {found[api.path].prefix} and {api.prefix}")
        if api.path:
            found[api.path] = api
    return found


async def in_thread(action: Callable[..., T], *arguments: object) -> T:
    """Call something that may wait for the disk, in a thread. Returns only after it, even if it is cancelled."""
    call = asyncio.ensure_future(asyncio.to_thread(action, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait({call})
        # Its error, if there is one, has no reader any more.
        call.exception()
        raise


def _were_cancelled(runs: list[BatchRun]) -> list[bool]:
    return [run.was_cancelled() for run in runs]


class BatchWorker:
    """Runs the batches of the context's folder until it is cancelled, while no other process does."""

    def __init__(self, context: ServerContext, folder: BatchFolder, apis: dict[str, Api[Any]]) -> None:
        self._context = context
        self._folder = folder
        self._apis = apis_by_path(apis)
        self._window = Window(max(context.config.batch_window, 1), Others(context.engine).are_there)
        self._lock: WritableFile | None = None
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        #: Those that are over: their state does not change any more.
        self._over: set[str] = set()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._purged_ns = 0
        #: What is wrong with the folder, so that it is logged once.
        self._failure = ""

    async def run(self) -> None:
        """Until it is cancelled. The batches under way end with it, and what they have recorded stays."""
        changed = self._folder.changed
        try:
            while True:
                changed.clear()
                try:
                    await self._look()
                    self._failure = ""
                except Exception as error:
                    if str(error) != self._failure:
                        self._failure = str(error)
                        _log.error("the folder of batches cannot be used", exc_info=error)
                try:
                    async with asyncio.timeout(POLL_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    pass
        finally:
            tasks = [task for _, task in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._lock is not None:
                self._lock.close()

    async def _look(self) -> None:
        """Start what is new, and end what was cancelled or has expired."""
        if self._lock is None:
            self._lock = await in_thread(self._folder.lock)
            if self._lock is None:
                return
            _log.info("batches run in this process", folder=str(self._folder.path))
        for owner, record in await in_thread(self._unknown):
            run = BatchRun(self._context, self._folder.of(owner), owner, record, self._apis, self._window)
            task = asyncio.create_task(self._run(run), name=record.batch.id)
            self._runs[record.batch.id] = run, task
        runs = [run for run, _ in self._runs.values()]
        for run, is_cancelled in zip(runs, await in_thread(_were_cancelled, runs), strict=True):
            run.check(is_cancelled=is_cancelled)
        await self._purge()

    def _unknown(self) -> list[tuple[str, BatchRecord]]:
        """The batches to start, the oldest first, and their owners."""
        found: list[tuple[str, BatchRecord]] = []
        present = set()

        def look(owner: str, folder: OwnerFolder) -> None:
            for batch_id in folder.batch_ids():
                present.add(batch_id)
                if batch_id in self._runs or batch_id in self._over:
                    continue
                record = folder.find_batch(batch_id)
                if record is None or record.batch.status in TERMINAL:
                    self._over.add(batch_id)
                else:
                    found.append((owner, record))

        self._folder.for_each(look)
        self._over &= present
        return sorted(found, key=lambda each: each[1].created_ns)

    async def _run(self, run: BatchRun) -> None:
        batch_id = run.record.batch.id
        log = _log.bind(batch=batch_id)
        try:
            log.info("batch begins", status=run.record.batch.status)
            await run.run(self._turns[run.owner])
            counts = run.record.batch.request_counts
            fields = {"completed": counts.completed, "failed": counts.failed, "total": counts.total}
            log.info("batch ended", status=run.record.batch.status, **fields)
            self._over.add(batch_id)
        except (EventLMError, OSError) as error:
            log.error("a batch stopped; it goes on when the server starts again", error=str(error))
            self._over.add(batch_id)
        except Exception:
            log.exception("a batch stopped; it goes on when the server starts again")
            self._over.add(batch_id)
        finally:
            del self._runs[batch_id]

    async def _purge(self) -> None:
        clock, config = self._context.system.clock, self._context.config
        now_ns = clock.monotonic_ns()
        if self._purged_ns and now_ns - self._purged_ns < PURGE_SECONDS * 1e9:
            return
        self._purged_ns = now_ns
        cutoff_ns = clock.unix_ns() - config.batch_keep_days * 86_400_000_000_000
        await in_thread(self._folder.for_each, lambda _, folder: folder.purge(cutoff_ns))


class BatchRun:
    """One batch, from validation or from where it was to its end."""

    def __init__(
        self,
        context: ServerContext,
        folder: OwnerFolder,
        owner: str,
        record: BatchRecord,
        apis: Mapping[str, Api[Any]],
        window: Window,
    ) -> None:
        self.owner = owner
        self.record = record
        self._context = context
        self._folder = folder
        self._apis = apis
        self._window = window
        self._results = Results(
            folder.disk, folder.content(record.output_file_id), folder.content(record.error_file_id)
        )
        self._prefix = f"batch_req_{record.batch.id.removeprefix('batch_')}_"
        #: Set to end it before all lines are over, with this status.
        self._stop = asyncio.Event()
        self._end: BatchStatus = "completed"
        self._saved_ns = 0
        self._writing = asyncio.Lock()
        self._is_stuck = False
        #: Of the results, so that the owner's files have no more than they may.
        self._max_bytes = 0

    def was_cancelled(self) -> bool:
        """Whether its owner wants it cancelled. Looks at the disk."""
        return self._folder.cancelling_at(self.record.batch.id) is not None

    def check(self, *, is_cancelled: bool) -> None:
        """End it if it was cancelled or has expired."""
        if self._stop.is_set():
            return
        if is_cancelled or self._now() >= self.record.batch.expires_at:
            self._end = "cancelled" if is_cancelled else "expired"
            self._stop.set()

    async def run(self, turn: asyncio.Lock) -> None:
        """Run it to its end. turn: held while it runs lines.

        Raises EngineUnavailableError if the engine has died, and anything during a drain: the batch is not over then.
        """
        try:
            await self._run(turn)
        except Exception as error:
            if self._context.draining or isinstance(error, EngineUnavailableError):
                raise
            _log.exception("a batch failed", batch=self.record.batch.id)
            self._fail("server_error", "The batch failed because of an error in the server; see the server's log.")
            await self._finalize()
        finally:
            self._results.close()

    async def _run(self, turn: asyncio.Lock) -> None:
        if self.record.batch.status == "validating" and not await self._validate():
            return
        await self._open()
        if not self._stop.is_set():
            try:
                await completed(self._run_lines(turn), self._stop)
            except FileNotFoundError as error:
                self._fail("input_file_not_found", f"The input file is gone: {error.filename}.")
        await self._finalize()

    async def _open(self) -> None:
        """Go on with the results that there are."""
        await self._persist(partial(self._results.open, mends=True))
        used = await self._persist(lambda: self._folder.num_bytes)
        self._max_bytes = self._folder.max_bytes - used + self._results.num_bytes
        self.check(is_cancelled=await in_thread(self.was_cancelled))

    def _fail(self, code: str, message: str) -> None:
        """End it as a failed one."""
        self._end = "failed"
        self.record.batch = structs.replace(
            self.record.batch, errors=BatchErrors([BatchError(code=code, message=message)])
        )
        self._stop.set()

    async def _validate(self) -> bool:
        """Count the lines. False if the batch has failed, because nothing in it can be run."""
        num_lines, errors = await self._persist(self._read_all)
        if errors:
            await self._change(status="failed", failed_at=self._now(), errors=BatchErrors(errors))
            await in_thread(self._folder.clear_marks, self.record.batch.id)
            return False
        counts = RequestCounts(total=num_lines)
        await self._change(status="in_progress", in_progress_at=self._now(), request_counts=counts)
        return True

    def _read_all(self) -> tuple[int, list[BatchError]]:
        """How many lines there are, and why none of them can be run."""
        most = self._context.config.batch_max_lines
        num_lines = num_valid = 0
        errors: list[BatchError] = []
        try:
            for line in self._lines():
                num_lines += 1
                num_valid += line.error is None
                if num_lines > most:
                    message = f"The file has more than {most} lines (--batch-max-lines)."
                    return num_lines, [BatchError(code="too_many_lines", message=message, line=line.number)]
                if line.error is not None and len(errors) < MAX_ERRORS:
                    errors.append(
                        BatchError(
                            code=line.error.code, message=line.error.message, param=line.error.param, line=line.number
                        )
                    )
        except FileNotFoundError:
            message = f"The input file {self.record.batch.input_file_id} is gone."
            return 0, [BatchError(code="input_file_not_found", message=message, param="input_file_id")]
        if not num_lines:
            errors = [BatchError(code="empty_file", message="The input file has no lines.", param="input_file_id")]
        return num_lines, [] if num_valid else errors

    def _lines(self) -> Iterator[InputLine]:
        file = self._folder.disk.open(self._folder.content(self.record.batch.input_file_id))
        try:
            yield from read_lines(
                file,
                self._apis,
                endpoint=self.record.batch.endpoint,
                max_bytes=self._context.config.max_body_bytes,
            )
        finally:
            file.close()

    async def _run_lines(self, turn: asyncio.Lock) -> None:
        async with turn:
            runner = LineRunner(
                self._context,
                self._apis,
                self._window,
                self._principal,
                batch_id=self.record.batch.id,
                prefix=self._prefix,
                scheduling=BATCH_SCHEDULING,
                # The queue has room for so many.
                max_at_once=max(self._context.config.batch_window, self._context.num_slots),
            )
            await runner.run(self._lines(), frozenset(self._results.ended), self._write_result)

    def _principal(self) -> Principal | None:
        """The holder of the batch's key, as it is now; None while there is none."""
        found = self._context.keys.holder(self.owner)
        return found if found is not None and "inference" in found.scopes else None

    async def _write_result(self, line: OutputLine) -> None:
        """Write what became of a line, as soon as the disk takes it, and now and then the counts."""
        async with self._writing:
            await self._persist(self._results.add, line)
            if self._results.num_bytes > self._max_bytes:
                limit = self._folder.max_bytes
                self._fail("storage_limit_exceeded", f"The files of this key may have {limit} bytes together.")
            now_ns = self._context.system.clock.monotonic_ns()
            if now_ns - self._saved_ns >= SAVE_SECONDS * 1e9:
                self._saved_ns = now_ns
                await self._change(**self._progress())

    def _progress(self) -> dict[str, Any]:
        counts = structs.replace(self._results.counts, total=self.record.batch.request_counts.total)
        return {"request_counts": counts, "usage": self._results.usage}

    async def _finalize(self) -> None:
        """Make the results known."""
        await self._change(status="finalizing", finalizing_at=self._now(), **self._progress())
        if self._end == "expired":
            await self._persist(self._write_expired)
        output, errors = self.record.output_file_id, self.record.error_file_id
        await self._persist(self._results.finish)
        batch = self.record.batch
        ends: dict[str, Any] = {
            "output_file_id": await self._persist(self._publish, output, f"{batch.id}_output.jsonl"),
            "error_file_id": await self._persist(self._publish, errors, f"{batch.id}_error.jsonl"),
        }
        if self._end == "cancelled":
            ends["cancelling_at"] = await in_thread(self._folder.cancelling_at, batch.id)
        ends |= {"status": self._end, f"{self._end}_at": self._now()}
        await self._change(**ends, **self._progress())
        await in_thread(self._folder.clear_marks, batch.id)

    def _write_expired(self) -> None:
        """Write an error for each line that was not run."""
        with contextlib.suppress(FileNotFoundError):
            for line in self._lines():
                if line.number not in self._results.ended:
                    error = line.error or LineError(code="batch_expired", message=_EXPIRED, line=line.number)
                    self._results.add(without_response(self._prefix, line, error))

    def _publish(self, file_id: str, name: str) -> str | None:
        """Make a file of results known. Returns its id, or None if there is none."""
        found = self._folder.disk.status(self._folder.content(file_id))
        if found is None or not found.num_bytes:
            return None
        now_ns = self._context.system.clock.unix_ns()
        created_at = now_ns // 1_000_000_000
        file = FileObject(
            id=file_id,
            bytes=found.num_bytes,
            created_at=created_at,
            expires_at=created_at + self.record.output_seconds,
            filename=name,
            purpose="batch_output",
        )
        self._folder.add_file(FileRecord(created_ns=now_ns, file=file))
        return file_id

    async def _change(self, **fields: Any) -> None:
        """Change the batch's object, on the disk too."""
        self.record.batch = structs.replace(self.record.batch, **fields)
        await self._persist(self._folder.save, self.record)

    async def _persist(self, action: Callable[..., T], *arguments: object) -> T:
        """Call something that uses the disk, again and again if that fails. Raises OSError during a drain, and
        FileNotFoundError for what somebody has removed.
        """
        while True:
            try:
                result = await in_thread(action, *arguments)
            except OSError as error:
                if self._context.draining or isinstance(error, FileNotFoundError):
                    raise
                await self._note_stuck(error)
                await asyncio.sleep(DISK_RETRY_SECONDS)
                continue
            if self._is_stuck:
                self._is_stuck = False
                await in_thread(self._folder.clear_stuck, self.record.batch.id)
                _log.info("a batch goes on: the disk takes its results again", batch=self.record.batch.id)
            return result

    async def _note_stuck(self, error: OSError) -> None:
        if self._is_stuck:
            return
        self._is_stuck = True
        _log.error("a batch waits: its results cannot be written", batch=self.record.batch.id, error=str(error))
        try:
            await in_thread(self._folder.mark_stuck, self.record.batch.id, error.errno or 0)
        except OSError as failure:
            _log.warning("that cannot be shown in its object", batch=self.record.batch.id, error=str(failure))

    def _now(self) -> int:
        return self._context.system.clock.unix_s()
