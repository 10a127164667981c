"""Which experts tokens pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eventlm.models.experts import Chosen, route
from eventlm.models.spec import ExpertsSpec, FeedForwardSpec


def spec(num_experts: int = 8, num_active: int = 3, **changes: Any) -> ExpertsSpec:
    return ExpertsSpec(num_experts=num_experts, num_active=num_active, expert=FeedForwardSpec(size=1), **changes)


def products(num_tokens: int = 50, num_experts: int = 8) -> Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(0)) * 2


def test_normalized_shares_of_a_softmax_are_the_softmax_of_the_chosen() -> None:
    products_TE = products()
    chosen = route(spec(), products_TE, None)
    largest_TA, numbers_TA = products_TE.topk(3)
    numbers_TA, order_TA = numbers_TA.sort()
    assert torch.equal(chosen.experts_TA, numbers_TA)
    torch.testing.assert_close(chosen.shares_TA, largest_TA.gather(-1, order_TA).softmax(-1))


def test_shares_that_are_not_normalized_are_those_of_all() -> None:
    products_TE = products()
    chosen = route(spec(is_normalized=False, scaling=2.5), products_TE, None)
    torch.testing.assert_close(chosen.shares_TA, 2.5 * products_TE.softmax(-1).gather(-1, chosen.experts_TA))


def test_a_correction_chooses_and_is_no_part_of_the_share() -> None:
    products_TE = products()
    correction_E = torch.tensor([0, 0, 5.0, 0, 0, 5.0, 0, 0])
    chosen = route(spec(num_active=2, routing="sigmoid", is_normalized=False), products_TE, correction_E)
    assert torch.equal(chosen.experts_TA, torch.tensor([[2, 5]]).expand(50, 2))
    assert torch.equal(chosen.shares_TA, products_TE.sigmoid()[:, [2, 5]])


def test_the_sum_that_shares_are_divided_by_has_a_least_value() -> None:
    products_TE = torch.full((1, 4), -30.0)
    chosen = route(spec(4, 2, routing="sigmoid", min_sum=0.5), products_TE, None)
    torch.testing.assert_close(chosen.shares_TA, products_TE.sigmoid()[:, :2] / 0.5)


def test_of_equal_experts_the_first_are_chosen() -> None:
    for num_experts in (8, 100, 512):
        products_TE = torch.zeros(3, num_experts)
        products_TE[1, [3, 5]] = 1.0
        found = route(spec(num_experts), products_TE, None).experts_TA.tolist()
        assert found == [[0, 1, 2], [0, 3, 5], [0, 1, 2]]


@pytest.mark.parametrize("correction", [0.0, -5.0])
def test_only_experts_of_the_best_groups_are_chosen(correction: float) -> None:
    """The largest of all is not among them. What is added to the shares may make all of them negative."""
    products_TE = torch.tensor([[0.9, -0.9, -0.9, 0.2, 0.2, 0.19, 0.2, 0.19, 0.0]])
    in_groups = spec(9, 4, routing="sigmoid", num_groups=3, num_active_groups=2)
    chosen = route(in_groups, products_TE, torch.full((9,), correction))
    assert chosen.experts_TA.tolist() == [[3, 4, 5, 6]]


def test_a_choice_does_not_depend_on_other_tokens() -> None:
    products_TE = products()
    all_chosen = route(spec(), products_TE, None)
    for token in range(50):
        alone = route(spec(), products_TE[token : token + 1], None)
        assert torch.equal(alone.experts_TA[0], all_chosen.experts_TA[token])
        assert torch.equal(alone.shares_TA[0], all_chosen.shares_TA[token])


def test_tokens_are_grouped_by_expert() -> None:
    experts_TA = torch.tensor([[1, 4], [0, 4], [1, 5]])
    shares_TA = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    groups = list(Chosen(experts_TA, shares_TA).groups(7))
    tokens = {expert: tokens.tolist() for expert, tokens, _ in groups}
    assert list(tokens.items()) == [(0, [1]), (1, [0, 2]), (4, [0, 1]), (5, [2])]
    assert torch.equal(torch.cat([shares for *_, shares in groups]), torch.tensor([0.3, 0.1, 0.5, 0.2, 0.4, 0.6]))
