"""The model of another server: no load makes it faster."""

from __future__ import annotations

from eventlm.replay.cost.backend_model import BackendCost, BackendsCost, describe_costs
from eventlm.replay.cost.model import LinearCost

COST = BackendCost(
    name="a", first_ns=1_000, prefill_ps=2_000_000, running_ns=10, token_ps=5_000_000, token_running_ps=1_000_000
)


def test_more_to_do_takes_longer() -> None:
    assert COST.first_token_ns(0, queued_ns=0, num_running=0) == 1_000
    assert COST.first_token_ns(3, queued_ns=0, num_running=2) == 1_000 + 3 * 2_000 + 2 * 10
    assert COST.first_token_ns(3, queued_ns=500, num_running=0) == 7_500
    assert [COST.token_interval_ps(n) for n in (0, 1, 2, 4)] == [5_000_000, 5_000_000, 6_000_000, 8_000_000]


def test_prompts_side_by_side_wait_for_none() -> None:
    cost = BackendCost(first_ns=1_000, queued_ppm=0)
    assert cost.first_token_ns(0, queued_ns=500, num_running=0) == 1_000


def test_further_servers_are_as_the_first_ones() -> None:
    servers = BackendsCost(backends=[COST, BackendCost(name="b")])
    assert [servers.of(number).name for number in range(5)] == ["a", "b", "a", "b", "a"]
    assert servers.coefficients() == [1_000_000, 2_000_000, 0, 0, 0]


def test_a_header_says_what_was_taken() -> None:
    servers, steps = BackendsCost(backends=[COST]), LinearCost(base_ps=7)
    assert describe_costs(["default"], [servers])["cost_model"]["backends"][0]["name"] == "a"
    assert [*describe_costs(["x", "y"], [steps, servers])["cost_models"]] == ["x", "y"]
