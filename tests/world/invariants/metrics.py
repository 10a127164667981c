"""What a server's pages, such as `/metrics`, show once everything has come to rest."""

from __future__ import annotations

from tests.world.invariants.checks import Checks
from tests.world.machine.network import Address
from tests.world.machine.process import Process
from tests.world.machine.world import World
from tests.world.programs.http_client import send

#: Gauges that are 0 at rest.
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "eventlm:backend_requests_running")


def read_page(world: World, server: Address, path: str, headers: dict[str, str] | None = None) -> str:
    """Fetch a page of a server."""
    process = Process(world, f"monitoring of {path}")
    texts: list[str] = []

    async def ask() -> int:
        texts.append(bytes((await send(process, server, "GET", path, headers=headers)).body).decode())
        return 0

    process.run(ask())
    world.run(lambda: process.is_dead, most_seconds=60)
    world.run_for(1)
    return texts[0]


def check_gauges(checks: Checks, metrics: str, *, num_backends: int) -> None:
    """Check that the gauges show nothing left of any request. num_backends: for a gateway, whose backends have a gauge
    each.
    """
    found = [line for line in metrics.splitlines() if line.startswith(_GAUGES)]
    for line in found:
        checks.check("gauges are 0 at rest", float(line.rpartition(" ")[2]) == 0, line)
    checks.check("gauges are there", len(found) > num_backends, f"{found}")
