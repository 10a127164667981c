"""Keys that appear where they must not are found, and so are keys that open what they must not."""

from __future__ import annotations

import pytest

from tests.world.invariants.checks import BrokenInvariant, Checks
from tests.world.invariants.keys import Secrets
from tests.world.plans.plan import Plan, draw_gateway_plan


def _plan() -> Plan:
    plans = (draw_gateway_plan(seed) for seed in range(100))
    return next(plan for plan in plans if plan.keys is not None and plan.gateway is not None and plan.gateway.key)


def test_each_key_is_found() -> None:
    plan, checks = _plan(), Checks()
    assert plan.keys is not None
    assert plan.gateway is not None
    secrets = Secrets(plan, checks)
    secrets.check("a page", b"sk-")
    sent = [each.key.key for each in plan.visits if each.key is not None and each.key.key]
    for key in (plan.gateway.key, plan.keys.operator.key, *(each.key for each in plan.keys.holders), *sent):
        with pytest.raises(BrokenInvariant, match="no key is shown"):
            secrets.check("a page", f"the key {key} is wrong".encode())
