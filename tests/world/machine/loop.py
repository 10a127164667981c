"""The event loop of one simulated process: asyncio's own, first in first out, but driven from outside.

Time is world time. Timers are up to a millisecond late, as on a real host, each by its own draw.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop
from typing import TYPE_CHECKING, Any

from tests.world.machine.network import Address, Listening, Socket, SocketTransport

if TYPE_CHECKING:
    from tests.world.machine.process import Process

_MOST_LATE_NS = 1_000_000
#: Cancelled timers are cleared out once there are more than this plus half of all timers.
_MOST_CANCELLED = 100


class Killed(SystemExit):
    """The process is dead: nothing that it does from here on has an effect. `except Exception` does not catch it."""


class _Task(asyncio.Task[Any]):
    """A task with a number as its hash: the default, its address, would make the order of sets differ between runs."""

    def __init__(self, *arguments: Any, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    def __init__(self, *, loop: asyncio.AbstractEventLoop, number: int) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Server:
    """Accepts connections, as asyncio's servers do."""

    def __init__(self, loop: ProcessLoop, protocol_factory: Callable[[], Any], listening: Listening) -> None:
        self.sockets = [listening]
        self._loop = loop
        self._protocol_factory = protocol_factory
        listening.watch(loop, self._accept)

    def close(self) -> None:
        """Accept no more connections."""
        [listening] = self.sockets
        listening.unwatch(self._loop)
        listening.drop(self._loop.process)

    def _accept(self) -> None:
        [listening] = self.sockets
        while listening.waiting:
            connection, _ = listening.accept()
            self._loop.create_task(self._loop.connect_accepted_socket(self._protocol_factory, connection))


class ProcessLoop(asyncio.BaseEventLoop):
    """The loop of a process. It runs when `World` calls `run_once`."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self._world = process.world
        self._num_made = 0
        self._num_timers = 0
        # Larger than the float precision of times of up to a year.
        self._clock_resolution = 1e-6
        self.set_exception_handler(self._note_error)
        self.set_task_factory(self._make_task)

    @property
    def due_ns(self) -> int | None:
        """World time at which there is something to run: now, or when the next timer is due; None: never."""
        if self._ready:  # type: ignore[attr-defined]
            return self._world.now_ns
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            scheduled[0]._scheduled = False
            heappop(scheduled)
        return self.process.world_ns(round(scheduled[0]._when * 1e9)) if scheduled else None

    def run_once(self) -> None:
        """Run the callbacks that are ready, once. Raises Killed if the process ends meanwhile."""
        self._thread_id = threading.get_ident()
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(
            firstiter=self._asyncgen_firstiter_hook,  # type: ignore[attr-defined]
            finalizer=self._asyncgen_finalizer_hook,  # type: ignore[attr-defined]
        )
        events._set_running_loop(self)
        try:
            self._run_ready()
        finally:
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*before)
            self._thread_id = None

    def let_go(self) -> None:
        """Forget all callbacks, and any that are added later."""
        self._ready = deque[Any](maxlen=0)
        self._scheduled.clear()  # type: ignore[attr-defined]

    def _run_ready(self) -> None:
        """One turn of asyncio's loop, without waiting for the real host."""
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        if self._timer_cancelled_count > _MOST_CANCELLED + len(scheduled) // 2:
            for handle in scheduled:
                handle._scheduled = not handle._cancelled
            scheduled[:] = [handle for handle in scheduled if handle._scheduled]
            heapify(scheduled)
            self._timer_cancelled_count = 0
        end_time = self.time() + self._clock_resolution
        while scheduled and scheduled[0]._when < end_time:
            handle = heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def time(self) -> float:
        """The process's monotonic clock, in seconds."""
        return self.process.monotonic_ns / 1e9

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """Call it at `when`, or up to a millisecond later."""
        self._num_timers += 1
        self._world.changed(self.process)
        late_ns = self._world.draws.draw("timer", self.process.pid, self._num_timers) % _MOST_LATE_NS
        return super().call_at(when + late_ns / 1e9, callback, *args, context=context)

    def _call_soon(self, callback: Callable[..., Any], args: Any, context: Any) -> Any:
        self._world.changed(self.process)
        return super()._call_soon(callback, args, context)  # type: ignore[misc]

    def create_future(self) -> asyncio.Future[Any]:
        self._num_made += 1
        return _Future(loop=self, number=self._num_made)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        self._num_made += 1
        return _Task(coroutine, loop=loop, number=self._num_made, **options)

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.process.note_error(context)

    def _write_to_self(self) -> None:
        """Does nothing: the world sees by itself that there is something to run."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run it in a thread of the simulated process: after some time, in one go."""
        future = self.create_future()

        def act() -> None:
            try:
                result = func(*args)
            except Exception as error:
                self.call_soon(_set_unless_done, future.set_exception, future, error)
            else:
                self.call_soon(_set_unless_done, future.set_result, future, result)

        self.process.in_thread(act)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        """Resolves names that the world's network knows, and numeric addresses."""
        addresses = self._world.network.resolve(host)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    def add_reader(self, fd: Listening, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Call back whenever connections are waiting there."""
        fd.watch(self, lambda: callback(*args))

    def remove_reader(self, fd: Listening) -> bool:  # type: ignore[override]
        return fd.unwatch(self)

    async def connect_accepted_socket(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], sock: Socket, **options: Any
    ) -> tuple[SocketTransport, Any]:
        return await self._connected(protocol_factory, sock)

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *, sock: Socket, **options: Any
    ) -> tuple[SocketTransport, Any]:
        return await self._connected(protocol_factory, sock)

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], Any],
        host: str = "",
        port: int = 0,
        *,
        sock: Socket | None = None,
        **options: Any,
    ) -> tuple[SocketTransport, Any]:
        if sock is None:
            sock = self._world.network.socket(self.process)
            try:
                await self.sock_connect(sock, (host, port))
            except BaseException:
                sock.drop(self.process)
                raise
        return await self._connected(protocol_factory, sock)

    async def sock_connect(self, sock: Socket, address: Address) -> None:  # type: ignore[override]
        await self._world.network.connect(sock, address)

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: str, port: int, **options: Any
    ) -> _Server:
        return _Server(self, protocol_factory, self._world.network.listen(self.process, (host, port)))

    async def _connected(self, protocol_factory: Callable[[], Any], sock: Socket) -> tuple[SocketTransport, Any]:
        protocol = protocol_factory()
        made = self.create_future()
        transport = SocketTransport(self, sock, protocol, made)
        await made
        return transport, protocol


def _set_unless_done(set_it: Callable[[Any], None], future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        set_it(value)
