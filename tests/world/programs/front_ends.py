"""Front-end processes: the real program, over the world's socket pair and the listening sockets that it inherits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from eventlm.cli.serve.front_end import FrontEndServer
from eventlm.frontend.protocol import FrontEndFailed, encode
from eventlm.system.frames import FrameConnection
from tests.world.machine.host import system_of
from tests.world.machine.process import Child, Process
from tests.world.machine.spawn_faults import Module

MODULE = "eventlm.cli.serve.front_end"


class WorldFrontEnd:
    """One front-end process."""

    def __init__(self, process: Process, arguments: Sequence[str]) -> None:
        self.process = process
        self._server: FrontEndServer | None = None
        control, listening = arguments
        process.run(self._serve(int(control), [int(number) for number in listening.split(",")]))

    async def _serve(self, control: int, listening: Sequence[int]) -> int:
        server = self._server = FrontEndServer(system_of(self.process, {}))
        handles = cast(dict[int, Any], self.process.handles)
        return await server.serve(
            handles[control],
            [handles[number] for number in listening],
            on_setup=lambda _: None,
            on_loaded=lambda: None,
        )

    def left(self) -> str:
        """What it still holds of requests, in words; empty if nothing."""
        context = None if self._server is None else self._server.context
        if context is None:
            return ""
        engine: Any = context.engine
        left = {
            "requests": context.num_running,
            "calls": len(engine._calls),
            "streams": len(engine._streams),
            "readers": engine._streams.num_readers,
        }
        return ", ".join(f"{number} {what}" for what, number in left.items() if number)


async def _say_wrong(process: Process, control: int) -> int:
    """Send an unreadable hello, or the message that it cannot start, and exit when told to."""
    is_over = process.loop.create_future()
    handle = cast(Any, process.handles[control])
    connection = await FrameConnection.open(handle, lambda _: None, lambda: is_over.set_result(1))
    connection.send(
        b"hello"
        if process.world.draws.draw("wrong hello", process.pid) % 2
        else encode(FrontEndFailed("it has no tokenizer"))
    )
    return cast(int, await is_over)


def module(front_ends: list[WorldFrontEnd], on_end: Callable[[], None]) -> Module:
    """The module that front ends run. front_ends: a list that always contains the living front ends. on_end: called
    when one has died.
    """

    def end(front_end: WorldFrontEnd) -> None:
        front_ends.remove(front_end)
        on_end()

    def run(process: Process, child: Child, arguments: Sequence[str]) -> None:
        front_end = WorldFrontEnd(process, arguments)
        front_ends.append(front_end)
        process.on_end(lambda _: end(front_end))

    def say_wrong(process: Process, child: Child, arguments: Sequence[str]) -> None:
        process.run(_say_wrong(process, int(arguments[0])))

    return Module(run, say_wrong)
