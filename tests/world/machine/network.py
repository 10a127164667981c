"""Connections between simulated processes: TCP and socket pairs. Bytes arrive late and in pieces, but in order.

Bytes that the kernel has accepted arrive even if the process that wrote them dies. As on a real host, a socket that is
closed with unread bytes resets the connection.
"""

from __future__ import annotations

import asyncio
import socket as real_socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.world.machine.loop import ProcessLoop
    from tests.world.machine.process import Process
    from tests.world.machine.world import World

Address = tuple[str, int]
#: Bytes that may be in flight in one direction before the other end reads, unless that end has chosen less.
WINDOW_BYTES = 64 * 1024
#: A transport pauses its writer above this many buffered bytes, until there are few enough again.
_HIGH_BYTES = 64 * 1024
_LATENCY_NS = (20_000, 300_000)
#: How many pieces in a million are split in two.
_SPLIT_PPM = 100_000


class Handle:
    """What a file descriptor stands for. It is closed when the last process that holds it drops it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.holders: set[Process] = set()

    def fileno(self) -> int:
        """A number that another process can be given."""
        return self._number

    def held_by(self, process: Process) -> None:
        """One more process holds it."""
        self.holders.add(process)
        process.handles[self._number] = self

    def drop(self, process: Process) -> None:
        """A process holds it no longer."""
        if process in self.holders:
            self.holders.remove(process)
            del process.handles[self._number]
            if not self.holders:
                self.closed()

    def closed(self) -> None:
        """Called when no process holds it any longer."""

    def setblocking(self, flag: bool) -> None:
        """Does nothing: no call ever blocks."""


class Socket(Handle):
    """One end of a connection. Within a process, only the loop uses sockets."""

    family = real_socket.AF_INET

    def __init__(self, network: Network, number: int, side: int) -> None:
        super().__init__(number)
        self.network = network
        self.side = side
        self.peer: Socket | None = None
        self.inbox = bytearray()
        #: The other end sends nothing more: the stream ends when the inbox is empty.
        self.has_end = False
        self.is_reset = False
        self.is_closed = False
        #: The last process that held it.
        self.holder: Process | None = None
        #: The process that held it died without closing it, or none accepted it.
        self.was_orphaned = False
        self.num_under_way = 0
        #: How many bytes may be in flight to this end before it reads.
        self.window_bytes = WINDOW_BYTES
        self.transport: SocketTransport | None = None
        self._num_pieces = 0
        self._last_ns = self._held_until_ns = 0

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it in the process that is running."""
        process = self.network.world.running
        if process is not None:
            self.drop(process)

    def held_by(self, process: Process) -> None:
        """As Handle.held_by."""
        self.holder = process
        super().held_by(process)

    def drop(self, process: Process) -> None:
        """As Handle.drop."""
        self.was_orphaned = process.is_dead and not self.is_closed
        super().drop(process)

    def closed(self) -> None:
        """As Handle.closed. The other end sees the end of the stream, or a reset if something was unread here."""
        self.transport = None
        if not self.is_closed:
            self.is_closed = True
            self._later(lambda peer: peer.end(resets=bool(self.inbox)))

    def abort(self) -> None:
        """Close it with a reset."""
        if not self.is_closed:
            self.is_closed = True
            self._later(lambda peer: peer.end(resets=True))

    def cut(self) -> None:
        """Reset both ends, as something on the way between them may do."""
        self.abort()
        if self.peer is not None:
            self.peer.abort()

    def hold(self, until_ns: int) -> None:
        """Let nothing through in either direction before that time."""
        for end in (self, self.peer):
            if end is not None:
                end._last_ns = end._held_until_ns = max(end._last_ns, until_ns)

    def send(self, data: bytes) -> int:
        """Pass bytes to the kernel. Returns how many it accepted."""
        assert self.peer is not None
        taken = data[: max(self.peer.window_bytes - self.num_under_way, 0)]
        draws, rest = self.network.world.draws, taken
        while rest:
            self._num_pieces += 1
            size = len(rest)
            if draws.happens(_SPLIT_PPM, "split", self._number, self.side, self._num_pieces):
                size = draws.between(1, size, "size", self._number, self.side, self._num_pieces)
            piece, rest = rest[:size], rest[size:]
            self.num_under_way += size
            self._later(lambda peer, piece=piece: peer.take(piece))
        return len(taken)

    def take(self, piece: bytes) -> None:
        """Bytes arrive."""
        if self.is_closed:
            self._later(lambda peer: peer.end(resets=True))
            return
        self.inbox += piece
        self._tell(SocketTransport.readable)

    def end(self, *, resets: bool) -> None:
        """The end of the stream arrives, or a reset."""
        self.has_end = True
        self.is_reset = self.is_reset or resets
        self._tell(SocketTransport.readable)

    def read(self) -> bytes:
        """All bytes that have arrived."""
        data = bytes(self.inbox)
        self.inbox.clear()
        if data:
            self._later(lambda peer: peer.acknowledge(len(data)))
        return data

    def acknowledge(self, num_bytes: int) -> None:
        """The other end has read this many bytes."""
        self.num_under_way -= num_bytes
        self._tell(SocketTransport.writable)

    def getsockname(self) -> Address:
        """Any address."""
        return ("127.0.0.1", self._number)

    def getpeername(self) -> Address:
        """Any address."""
        return ("127.0.0.1", self._number + 1)

    def setsockopt(self, *_: object) -> None:
        """Does nothing: there are no options."""

    def getsockopt(self, *_: object) -> int:
        """0: there are no options."""
        return 0

    def _tell(self, what: Callable[[SocketTransport], None]) -> None:
        if self.transport is not None:
            what(self.transport)

    def _later(self, act: Callable[[Socket], None]) -> None:
        """Have something happen at the other end, after everything sent before has arrived."""
        world, peer = self.network.world, self.peer
        if peer is None:
            return
        self._num_pieces += 1
        if world.now_ns < self._held_until_ns:
            world.faults["held message"] += 1
        latency_ns = world.draws.between(*_LATENCY_NS, "latency", self._number, self.side, self._num_pieces)
        self._last_ns = max(self._last_ns + 1, world.now_ns + latency_ns)
        world.at(self._last_ns, lambda: act(peer))


class Listening(Handle):
    """A listening socket. Several processes may hold it; all of them accept from one queue."""

    family = real_socket.AF_INET

    def __init__(self, network: Network, number: int, address: Address) -> None:
        super().__init__(number)
        self.network = network
        self.address = address
        self.waiting: deque[Socket] = deque()
        self._watches: dict[ProcessLoop, Callable[[], None]] = {}

    def getsockname(self) -> Address:
        """The address on which it listens."""
        return self.address

    def watch(self, loop: ProcessLoop, callback: Callable[[], None]) -> None:
        """Call back whenever connections are waiting."""
        self._watches[loop] = callback
        if self.waiting:
            loop.call_soon(callback)

    def unwatch(self, loop: ProcessLoop) -> bool:
        """Stop calling back. Returns whether the loop was watching."""
        return self._watches.pop(loop, None) is not None

    def add(self, end: Socket) -> None:
        """A new connection waits to be accepted."""
        self.waiting.append(end)
        for loop, callback in self._watches.items():
            if not loop.process.is_dead:
                loop.call_soon(callback)

    def accept(self) -> tuple[Socket, Address]:
        """Accept the next connection. Raises BlockingIOError if there is none."""
        if not self.waiting:
            raise BlockingIOError
        end = self.waiting.popleft()
        end.held_by(end.network.world.require_running())
        return end, ("127.0.0.1", end.fileno())

    def close(self) -> None:
        """Close it in the process that is running."""
        self.drop(self.network.world.require_running())

    def closed(self) -> None:
        """As Handle.closed. Waiting connections are reset."""
        while self.waiting:
            end = self.waiting.popleft()
            end.was_orphaned = True
            end.abort()


class Network:
    """Connects the processes of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        #: The addresses of each name, and whether DNS currently returns each.
        self.names: dict[str, dict[str, bool]] = {}
        #: Before that time, no connection to the address is made.
        self.held_until_ns: dict[Address, int] = {}
        self._listening: dict[Address, list[Listening]] = {}
        self._num_handles = 100

    def listen(self, process: Process, address: Address, *, shares: bool = False) -> Listening:
        """A new listening socket. shares: several sockets may have the address, and each connection goes to one of
        them, as with SO_REUSEPORT. Raises OSError if the address is in use.
        """
        with process.call():
            present = self._open_at(address)
            if present and not shares:
                raise OSError(98, "Address already in use")
            self._num_handles += 2
            listening = Listening(self, self._num_handles, address)
            self._listening[address] = [*present, listening]
            listening.held_by(process)
            return listening

    def resolve(self, name: str) -> list[str]:
        """The addresses of a name. An address resolves to itself."""
        if name not in self.names:
            return [name]
        if not all(self.names[name].values()):
            self.world.faults["name without an address"] += 1
        return [address for address, is_there in self.names[name].items() if is_there]

    def _open_at(self, address: Address) -> list[Listening]:
        return [each for each in self._listening.get(address, ()) if each.holders]

    def pair(self, first: Process, second: Process) -> tuple[Socket, Socket]:
        """Both ends of a new connection."""
        ours = self.socket(first)
        theirs = self._other_end(ours)
        theirs.held_by(second)
        return ours, theirs

    def socket(self, process: Process) -> Socket:
        """A new socket, not yet connected."""
        self._num_handles += 2
        made = Socket(self, self._num_handles - 1, 0)
        made.held_by(process)
        return made

    def _other_end(self, ours: Socket) -> Socket:
        """Make the other end of a socket. No process holds it yet."""
        theirs = Socket(self, ours.fileno() + 1, 1)
        ours.peer, theirs.peer = theirs, ours
        return theirs

    async def connect(self, ours: Socket, address: Address) -> None:
        """Connect a socket to an address. Raises ConnectionRefusedError if nothing listens there."""
        latency_ns = self.world.draws.between(*_LATENCY_NS, "connect", ours.fileno())
        held_ns = self.held_until_ns.get(address, 0) - self.world.now_ns
        if held_ns > 0:
            self.world.faults["held connection"] += 1
        await asyncio.sleep(max(latency_ns, held_ns) / 1e9)
        present = self._open_at(address)
        if not present:
            raise ConnectionRefusedError(111, f"Connect call failed {address}")
        place = self.world.draws.draw("queue", ours.fileno()) % len(present)
        with self.world.require_running().call():
            present[place].add(self._other_end(ours))


class SocketTransport(asyncio.Transport):
    """A transport like asyncio's over a real socket."""

    def __init__(self, loop: ProcessLoop, sock: Socket, protocol: Any, made: asyncio.Future[None]) -> None:
        super().__init__({"socket": sock, "sockname": sock.getsockname(), "peername": sock.getpeername()})
        self._loop = loop
        self._sock = sock
        self._protocol = protocol
        self._buffer = bytearray()
        self._low_bytes, self._high_bytes = _HIGH_BYTES // 4, _HIGH_BYTES
        self._is_closing = False
        self._is_lost = False
        self._is_reading_paused = False
        self._is_writing_paused = False
        self._has_seen_end = False
        sock.transport = self
        loop.call_soon(self._begin, made)

    def _begin(self, made: asyncio.Future[None]) -> None:
        self._protocol.connection_made(self)
        if not made.done():
            made.set_result(None)
        self.readable()

    def readable(self) -> None:
        """Something has arrived. A process that is not reading notices a reset only when it has something to write."""
        self._loop.call_soon(self._read)
        self.writable()

    def writable(self) -> None:
        """There is room to send."""
        if self._buffer:
            self._loop.call_soon(self._flush)

    def _read(self) -> None:
        """Read like a loop that asks the kernel again while there is something to read."""
        sock = self._sock
        if self._is_lost or self._is_reading_paused or self._is_closing or self._has_seen_end:
            return
        if data := sock.read():
            self._protocol.data_received(data)
            if sock.has_end:
                self.readable()
        elif sock.is_reset:
            self._lose(ConnectionResetError(104, "Connection reset by peer"))
        elif sock.has_end:
            self._has_seen_end = True
            if not self._protocol.eof_received():
                self.close()

    def _flush(self) -> None:
        if self._is_lost:
            return
        if self._sock.is_reset and self._buffer:
            self._lose(BrokenPipeError(32, "Broken pipe"))
            return
        del self._buffer[: self._send(bytes(self._buffer))]
        if self._is_writing_paused and len(self._buffer) <= self._low_bytes:
            self._is_writing_paused = False
            self._protocol.resume_writing()
        if not self._buffer and self._is_closing:
            self._lose(None)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_lost:
            raise RuntimeError("written to a closed connection, which is an error under uvloop")
        if self._sock.is_closed or (self._is_closing and not self._buffer):
            return
        if self._sock.is_reset:
            self._is_closing = True
            self._buffer.clear()
            self._loop.call_soon(self._lose, BrokenPipeError(32, "Broken pipe"))
            return
        data = bytes(data)
        if not self._buffer:
            data = data[self._send(data) :]
        self._buffer += data
        if len(self._buffer) > self._high_bytes and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def _send(self, data: bytes) -> int:
        with self._loop.process.call() as is_cut:
            return self._sock.send(data[: len(data) // 2] if is_cut else data)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._buffer:
                self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self._is_lost:
            self._is_closing = True
            self._buffer.clear()
            self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._buffer.clear()
        try:
            self._protocol.connection_lost(error)
        finally:
            self._sock.drop(self._loop.process)

    def pause_reading(self) -> None:
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        if self._is_reading_paused:
            self._is_reading_paused = False
            self.readable()

    def is_reading(self) -> bool:
        return not self._is_reading_paused and not self._is_closing

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = _HIGH_BYTES if low is None else 4 * low
        self._low_bytes, self._high_bytes = high // 4 if low is None else low, high

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol
