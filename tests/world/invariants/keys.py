"""API keys of clients and backends: a wrong key opens nothing, and no key is shown anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tests.world.invariants.checks import Checks
from tests.world.machine.file_tree import FileTree
from tests.world.plans.keys_plan import KEYS

if TYPE_CHECKING:
    from tests.world.plans.plan import Plan
    from tests.world.programs.client import Client


def check_let_in(client: Client, checks: Checks) -> None:
    """Check that a client without a valid key is refused, and one with a valid key is served within its limits."""
    sent = client.visit.key
    if sent is None:
        return
    where = f"visit {client.visit.number}"
    for reply in (*client.replies, *([client.ended] if client.ended is not None else [])):
        if sent.holder is None:
            checks.check(
                "wrong keys open nothing", reply.status != 200 and not reply.sent(), f"{where}: {reply.status}"
            )
        else:
            checks.check("right keys are let in", reply.status not in (401, 403), f"{where}: {reply.status}")


class Secrets:
    """All keys of a plan, those for idempotency included."""

    def __init__(self, plan: Plan, checks: Checks) -> None:
        keys = {each.key.key for each in plan.visits if each.key is not None}
        if plan.keys is not None:
            keys |= {each.key for each in (*plan.keys.holders, plan.keys.operator)}
        if plan.gateway is not None:
            keys.add(plan.gateway.key)
        keys |= {each.idempotency_key for each in plan.visits}
        self._has_file = plan.keys is not None
        self._keys = [key.encode() for key in sorted(keys - {""})]
        self._checks = checks

    def check(self, where: str, content: bytes) -> None:
        """Check that no key is in this content."""
        found = [key for key in self._keys if key in content]
        self._checks.check("no key is shown", not found, f"{where}: {found}")

    def check_client(self, client: Client) -> None:
        """Check that no key is in what a client received."""
        for reply in client.replies:
            self.check(f"a reply to visit {client.visit.number}", repr(reply.headers).encode() + bytes(reply.body))

    def check_all(self, lines: Iterable[dict[str, Any]], tree: FileTree) -> None:
        """Check that no key is in the server's log lines, nor in its files."""
        for line in lines:
            self.check("a line of the log", repr(line).encode())
        own = tree.find_file(KEYS) if self._has_file else None
        for file in tree.files():
            if file is not own:
                self.check(f"file {file.number}", bytes(file.content))
