"""Addresses of other servers, as a header has them."""

from __future__ import annotations

from msgspec import structs

from eventlm.replay.backend_names import names_at_start
from tests.replay.backend_runs import backends_of
from tests.workload import make_core


def test_servers_are_named_by_the_numbers_of_their_replicas() -> None:
    machine = next(each for seed in range(2, 60, 3) if (each := backends_of(seed)).others)
    header, _ = make_core(machine)
    own, servers = header.sets
    assert not own.core.forwards
    described = [{"url": f"http://host:{number}"} for number in range(servers.core.num_replicas + 3)]
    servers = structs.replace(servers, host={"backends": described})
    names = names_at_start(header.with_sets([own, servers]))
    first = own.core.num_replicas
    assert names == {first + number: f"host:{number}" for number in range(servers.core.num_replicas)}
