"""Seeds of a gateway: the real client, retries and hedges, over backends that fail in every way."""

from __future__ import annotations

import pytest

from tests.world.fresh_process import printed_with_other_hashes
from tests.world.plans.plan import draw_gateway_plan
from tests.world.run import run_plan

_DIGEST = """
from tests.world.plans.plan import draw_gateway_plan
from tests.world.run import run_plan
print(run_plan(draw_gateway_plan({})).digest)
"""
_SEED = 19


@pytest.mark.parametrize("seed", [2, 8, 13, 16, 19, 27])
def test_seeds_come_to_rest_with_every_invariant(seed: int) -> None:
    ran = run_plan(draw_gateway_plan(seed))
    assert ran.checks["served once all is well"] == 1
    assert ran.checks["attempts are few"] >= 2


def test_a_seed_gives_the_same_bytes_in_another_process() -> None:
    assert printed_with_other_hashes(_DIGEST.format(_SEED)) == {run_plan(draw_gateway_plan(_SEED)).digest}
