"""What backends find again in their caches under each router, on few conversations."""

from __future__ import annotations

import sys

import pytest

from benchmarks.gateway import prefixes


def test_each_router_stands_beside_one_backend_with_all_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--backends", "2", "--conversations", "6", "--at-once", "2", "--turns", "3"]
    monkeypatch.setattr(sys, "argv", ["prefixes.py", *flags, "--routers", "prefix_affinity", "round_robin"])
    assert prefixes.main() == 0
    _, one, affinity, in_turn = capsys.readouterr().out.splitlines()
    assert one.startswith("one with all memory")
    assert affinity.split()[0] == "prefix_affinity"
    assert in_turn.split()[3] == "1.00"
    # Of what one backend finds.
    assert float(affinity.split()[2]) > float(in_turn.split()[2])
