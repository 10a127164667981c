"""Backends: other servers that run the model, each in a simulated process, and how a gateway connects to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, MutableSet
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar
from unittest.mock import patch

import aiohttp

from eventlm.gateway.client import HttpBackend
from tests.gateway.stub_backend import StubBackend
from tests.gateway.stub_faults import Fault
from tests.world.machine.network import Socket
from tests.world.machine.process import Process
from tests.world.machine.world import World
from tests.world.plans.gateway_plan import PORT, BackendPlan

ItemT = TypeVar("ItemT")


@dataclass(kw_only=True)
class _Counted(Fault):
    """A fault that the world counts when it strikes."""

    world: World

    @classmethod
    def of(cls, fault: Fault, world: World) -> _Counted:
        """The same fault, counted in a world."""
        return cls(**{each.name: getattr(fault, each.name) for each in fields(fault)}, world=world)

    def hits(self, number: int) -> bool:
        """As Fault.hits."""
        if not super().hits(number):
            return False
        self.world.faults[f"backend: {self.kind}"] += 1
        return True


class WorldBackend:
    """A backend, which may be killed and restarted at the same address."""

    def __init__(self, world: World, plan: BackendPlan) -> None:
        self.plan = plan
        self._faults: list[Fault] = [_Counted.of(each, world) for each in plan.faults]
        self._world = world
        self._num_started = 0
        self.start()

    def start(self) -> None:
        """Start it with an empty cache."""
        plan = self.plan
        self.stub = StubBackend(kind=plan.kind, host=plan.host, port=PORT, faults=self._faults, **plan.options)
        self._num_started += 1
        self.process = Process(self._world, f"backend {plan.host}, start {self._num_started}")
        self.process.run(self._serve())

    def start_again(self) -> None:
        """Start it again if it is dead."""
        if self.process.is_dead:
            self.start()

    def heal(self) -> None:
        """Remove its faults, so that all further requests succeed."""
        self._faults = self.stub.faults = []
        self.stub.key = self.plan.options["key"]
        self.start_again()

    async def _serve(self) -> int:
        async with self.stub:
            await asyncio.Event().wait()
        return 0


class _OrderedSet(MutableSet[ItemT], Generic[ItemT]):
    """A set that iterates in the order of insertion, not of addresses."""

    def __init__(self) -> None:
        self._items: dict[ItemT, None] = {}

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[ItemT]:
        return iter([*self._items])

    def __len__(self) -> int:
        return len(self._items)

    def add(self, value: ItemT) -> None:
        self._items[value] = None

    def discard(self, value: ItemT) -> None:
        self._items.pop(value, None)


class _WorldConnector(aiohttp.TCPConnector):
    """aiohttp's connector, over the world's network."""

    def __init__(self, process: Process, **options: Any) -> None:
        def make(_: object) -> Socket:
            return process.world.network.socket(process)

        super().__init__(socket_factory=make, **options)  # type: ignore[arg-type]
        self._acquired = _OrderedSet()  # type: ignore[assignment]


def connect_from(process: Process) -> Callable[..., HttpBackend]:
    """A function that makes clients of backends in a process."""

    def connect(spec: Any) -> HttpBackend:
        return HttpBackend(spec, connector=lambda **options: _WorldConnector(process, **options))

    return connect


def in_time_of(world: World) -> Any:
    """A context in which aiohttp's connections age by the clock of the process that owns them."""
    return patch("aiohttp.connector.monotonic", lambda: world.require_running().monotonic_ns / 1e9)
