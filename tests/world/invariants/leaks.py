"""What processes leak once all requests are over, and once a process has shut down cleanly: tasks, timers, open files,
threads, children and listening sockets. At rest, only what is listed here may be left, since it goes on by design.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from eventlm.bus.run_folder import TRACE_NAME
from tests.world.machine.left import tasks_of, timers_of
from tests.world.machine.network import Listening
from tests.world.programs import front_ends, workers

if TYPE_CHECKING:
    from tests.world.invariants.checks import Checks
    from tests.world.machine.process import Process
    from tests.world.run import Run

#: Callbacks of timers with which coroutines wait; each task needs at most one.
_WAITS = {"_release_waiter", "_set_result_unless_cancelled", "Timeout._on_timeout"}


class _ByDesign(NamedTuple):
    """The most that a process has at rest. tasks: by name of the coroutine; timers: by name of the callback, without
    those of tasks that wait for a time.
    """

    tasks: dict[str, int]
    timers: dict[str, int] = {}
    num_files: int = 0
    threads: tuple[str, ...] = ()
    num_listening: int = 1


#: A front end serves, sends heartbeats, and watches the key file if there is one.
_FRONT_END = _ByDesign({"WorldFrontEnd._serve": 1, "FrontEndServer._beat": 1, "ApiKeys.watch": 1})
#: A worker sends heartbeats, and watches its parent.
_WORKER = _ByDesign({}, threads=("heart", "parent"), num_listening=0)


class Leaks:
    """Looks for leaks in the processes of a run's last server."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._checks: Checks = run.checks

    def check_rest(self) -> None:
        """Check for leaks once all requests are over."""
        server, world = self._run.server, self._run.world
        children = [each for each in world.processes if each.parent is not None]
        strangers = [each.name for each in children if each.parent is not server.process]
        self._checks.check("no child is left", not strangers, f"{strangers} are of servers that have died")
        for module, most in self._most_children().items():
            names = [each.name for each in children if each.name.startswith(module)]
            self._checks.check("no child is left", len(names) <= most, f"{names} for {most}")
        for worker in children:
            if worker.name.startswith(workers.MODULE):
                self._check(worker, _WORKER)
        num_workers, num_replicas = self._most_children()[workers.MODULE], self._run.config.scheduler.replicas
        self._check_folders(most=num_replicas if num_workers > num_replicas else 0)
        self._check(server.process, self._engine())
        for front_end in server.front_ends:
            self._check(front_end.process, _FRONT_END)

    def _most_children(self) -> dict[str, int]:
        config = self._run.config
        num_ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
        num_workers = 0 if self._run.gateway is not None else config.scheduler.replicas * num_ranks
        return {workers.MODULE: num_workers, front_ends.MODULE: config.server.api_servers}

    def _engine(self) -> _ByDesign:
        config, gateway, children = self._run.config, self._run.gateway, self._most_children()
        num_workers, num_front_ends = children[workers.MODULE], children[front_ends.MODULE]
        num_replicas = config.scheduler.replicas if num_workers else 0
        num_backends = len(gateway.backends) if gateway is not None else 0
        tasks = {
            "WorldServer._serve": 1,
            # Without front ends, the engine's process handles requests, and watches the key file.
            "ApiKeys.watch": 0 if num_front_ends else 1,
            # The server waits for a signal to stop, and for the loss of all front ends.
            "Event.wait": 2 if num_front_ends else 0,
            # Supervision of front ends, workers and backends, which goes on until the end.
            "FrontEnd._supervise": num_front_ends,
            "ReplicaController._supervise": num_replicas,
            "RankGroup._listen": num_workers if num_workers > num_replicas else 0,
            "WorkerProcess._log_output": num_workers,
            "Child.wait": num_workers + num_front_ends,
            "BackendController._look_after": num_backends,
            "BackendSet._follow": min(num_backends, 1),
        }
        timers = {
            # The core has one timer; the recorder has one for writes that are late, and one for the next sync.
            "AsyncioClock._call": 1,
            "InferenceEngine._guarded": 2,
            # aiohttp's timers, which close idle connections to backends.
            "_weakref_handle": num_backends,
        }
        return _ByDesign(
            tasks,
            timers,
            num_files=2 if config.record.recover else 1,
            threads=("eventlm-recorder",),
            num_listening=max(num_front_ends, 1),
        )

    def _check(self, process: Process, most: _ByDesign) -> None:
        checks, name = self._checks, process.name
        tasks, timers = tasks_of(process), timers_of(process)
        more = tasks - Counter(most.tasks)
        checks.check("no task is left", not more, f"{name}: {more}")
        num_waits = sum(timers.pop(each, 0) for each in _WAITS)
        checks.check("no timer is left", num_waits <= tasks.total(), f"{name}: {num_waits} of {tasks}")
        more = timers - Counter(most.timers)
        checks.check("no timer is left", not more, f"{name}: {more}")
        files = self._run.world.disk.open_files(name)
        # A log has a temporary name until its first line is written, and perhaps a spool beside it.
        is_log = all(each.name.startswith((TRACE_NAME, "spool-")) for each in files)
        checks.check("no file is left open", is_log and len(files) <= most.num_files, f"{name}: {files}")
        threads = Counter(process.threads) - Counter(most.threads)
        checks.check("no thread is left", not threads, f"{name}: {threads}")
        num_listening = sum(isinstance(each, Listening) for each in process.handles.values())
        checks.check("no socket is left", num_listening <= most.num_listening, f"{name}: {num_listening} listen")

    def check_ends(self) -> None:
        """Check that processes that shut down cleanly left nothing behind."""
        left = self._run.world.left
        self._checks.check("an orderly end leaves nothing", not left, f"{left}")
        if self._run.server.process.returncode == 0:
            self._check_folders(most=0)

    def _check_folders(self, *, most: int) -> None:
        """Check the ranks' shared folders; each replica has one."""
        folders = list(self._run.world.folders)
        self._checks.check("no shared folder is left", len(folders) <= most, f"{folders} for {most}")
