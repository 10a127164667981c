"""The event loop of one simulated process: asyncio's own, first in first out, but driven from outside.

Time is the world's. Timers are up to a millisecond late, as they are on a real host, each by a draw of its own.
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
#: So many timers may have been cancelled and still be there, or half of all.
_MOST_CANCELLED = 100


class Killed(SystemExit):
    """The process is dead: nothing that it does from here on has an effect. Not caught by what catches errors."""


class _Task(asyncio.Task[Any]):
    """Hashed by a number and not by its address, which would order the sets that it is in."""

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
    """Takes connections, as asyncio's servers do."""

    def __init__(self, loop: ProcessLoop, protocol_factory: Callable[[], Any], listening: Listening) -> None:
        self.sockets = [listening]
        self._loop = loop
        self._protocol_factory = protocol_factory
        listening.watch(loop, self._accept)

    def close(self) -> None:
        """Take no more."""
        [listening] = self.sockets
        listening.unwatch(self._loop)
        listening.drop(self._loop.process)

    def _accept(self) -> None:
        [listening] = self.sockets
        while listening.waiting:
            connection, _ = listening.accept()
            self._loop.create_task(self._loop.connect_accepted_socket(self._protocol_factory, connection))


class ProcessLoop(asyncio.BaseEventLoop):
    """Runs when `World` calls `run_once`."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self._world = process.world
        self._num_made = 0
        self._num_timers = 0
        # Above the precision of floats for times of a year.
        self._clock_resolution = 1e-6
        self.set_exception_handler(self._note_error)
        self.set_task_factory(self._make_task)

    @property
    def due_ns(self) -> int | None:
        """When there is something to run: now, the time of the next timer, or never."""
        if self._ready:  # type: ignore[attr-defined]
            return self._world.now_ns
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            scheduled[0]._scheduled = False
            heappop(scheduled)
        return self.process.world_ns(round(scheduled[0]._when * 1e9)) if scheduled else None

    def run_once(self) -> None:
        """Run what is ready, once. Raises Killed if the process ends meanwhile."""
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
        """Forget all callbacks, those too that may yet come."""
        self._ready = deque[Any](maxlen=0)
        self._scheduled.clear()  # type: ignore[attr-defined]

    def _run_ready(self) -> None:
        """What asyncio does in a turn, without what waits for the real host."""
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
        """Of the host's monotonic clock, in seconds."""
        return self.process.monotonic_ns / 1e9

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """Not before `when`, and up to a millisecond later."""
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
        """The world sees by itself that there is something to run."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """In a thread of the simulated process: some time later, at once."""
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
        """Of names that the world's network has, and of numeric addresses."""
        addresses = self._world.network.resolve(host)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    def add_reader(self, fd: Listening, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Call back whenever connections wait there."""
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
