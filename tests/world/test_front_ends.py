"""Front ends of a world: what their clients receive when they die, and that a seed gives the same bytes again."""

from __future__ import annotations

from msgspec import structs

from tests.world.fresh_process import printed_with_other_hashes
from tests.world.machine.process import SIGKILL
from tests.world.machine.world import SECOND
from tests.world.plans.plan import Fault, Plan, Visit, draw_plan
from tests.world.programs.client import Client
from tests.world.run import Run, quiet, run_plan

_NUM_CLIENTS = 12
_DIGEST = """
from tests.world.run import run_plan
from tests.world.test_front_ends import plan
print(run_plan(plan(breaks_after=5)).digest)
"""


def plan(*, breaks_after: int = -1, num_tries: int = 4) -> Plan:
    """A plan with streams of 100 tokens over two front ends, one of which dies midway."""
    drawn = next(each for each in map(draw_plan, range(100)) if each.gateway is None and each.is_calm)
    config = drawn.config
    config = structs.replace(
        config,
        model=structs.replace(config.model, fake={"base_ns": 20_000_000}),
        scheduler=structs.replace(config.scheduler, replicas=1, max_num_seqs=_NUM_CLIENTS, max_num_batched_tokens=256),
        server=structs.replace(config.server, api_servers=2, resume_seconds=30, api_keys_file=""),
    )
    bodies = [
        {"model": "m", "seed": seed, "max_tokens": 100, "n": 1, "stream": True, "prompt": "ppp"}
        for seed in range(_NUM_CLIENTS)
    ]
    visits = [
        Visit(number, 0, body, "/v1/completions", num_tries=num_tries, breaks_after=breaks_after)
        for number, body in enumerate(bodies)
    ]
    faults = [Fault(0, SECOND, "kill front end", 0)]
    return drawn._replace(
        is_calm=False, config=config, num_blocks=96, seconds=20, visits=visits, faults=faults, keys=None
    )


def _clients(what: Plan) -> list[Client]:
    with quiet() as lines:
        run = Run(what, lines)
        ran = run.run()
    assert ran.faults["kill front end"] == 1
    return run.clients


def _has_lost_front_end(client: Client) -> bool:
    server = client.replies[0].server
    return server is not None and server.returncode == -SIGKILL


def _is_whole(client: Client) -> bool:
    return client.reply.is_done and client.shown()[0][1]


def test_a_front_end_that_dies_takes_its_own_clients_with_it_and_no_others() -> None:
    clients = _clients(plan(num_tries=0))
    lost = [client for client in clients if _has_lost_front_end(client)]
    assert 0 < len(lost) < len(clients)
    assert all(client.reply.was_orphaned and not client.reply.is_done for client in lost)
    assert all(_is_whole(client) for client in clients if client not in lost)


def test_who_comes_again_after_its_front_end_has_died_gets_what_there_was_and_is_told() -> None:
    clients = _clients(plan())
    lost = [client for client in clients if _has_lost_front_end(client)]
    assert 0 < len(lost) < len(clients)
    for client in lost:
        first, last = client.stream_replies
        assert first.was_orphaned
        assert last.is_whole
        assert b"ended this request before it was complete" in last.body


def test_streams_go_on_at_any_front_end() -> None:
    clients = _clients(plan(breaks_after=60))
    whole = [client for client in clients if _is_whole(client)]
    assert any(len({reply.server for reply in client.stream_replies}) > 1 for client in whole)
    assert all(_has_lost_front_end(client) or client.was_late for client in clients if client not in whole)


def test_a_front_end_that_dies_gives_the_same_bytes_in_another_process() -> None:
    assert printed_with_other_hashes(_DIGEST) == {run_plan(plan(breaks_after=5)).digest}
