from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from eventlm.kernels.cpu.products import Products

#: Of bfloat16, whose last bit is rounded.
TOLERANCE = 1 / 128


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_out", "num_in"), [(96, 64), (50, 40), (33, 7), (1, 130)])
def test_products(builds: list[str], num_out: int, num_in: int, num_threads: int) -> None:
    weight, bias = bfloat16(num_out, num_in), bfloat16(num_out).float()
    for build in builds:
        products = Products(build, most_inputs=130, num_threads=num_threads)
        for given in (None, bias):
            matrix = products.pack(weight, given)
            for num_rows in (1, 3, 17, 70):
                x = bfloat16(2, num_rows, num_in)
                expected = linear(x.float(), weight.float(), given)
                error = (products.multiply(matrix, x).float() - expected).abs().max()
                assert error <= TOLERANCE * expected.abs().max(), (build, num_rows)


def test_a_row_does_not_depend_on_the_others(builds: list[str]) -> None:
    x = bfloat16(65, 96)
    for build in builds:
        if build == "amx":
            continue
        products = Products(build, most_inputs=96, num_threads=2)
        matrix = products.pack(bfloat16(80, 96), None)
        alone = torch.cat([products.multiply(matrix, row[None]) for row in x])
        assert torch.equal(products.multiply(matrix, x), alone), build


def test_a_row_does_not_depend_on_those_of_wider_matrices(builds: list[str]) -> None:
    """Not even on numbers that are none, where it ends before a tile does."""
    for build in builds:
        products = Products(build, most_inputs=96, num_threads=1)
        narrow, wide = products.pack(bfloat16(32, 80), None), products.pack(bfloat16(32, 96), None)
        x = bfloat16(3, 80)
        before = products.multiply(narrow, x)
        products.multiply(wide, torch.full((3, 96), torch.nan, dtype=torch.bfloat16))
        assert torch.equal(products.multiply(narrow, x), before), build


def test_no_rows(builds: list[str]) -> None:
    products = Products(builds[0], most_inputs=32, num_threads=1)
    assert products.multiply(products.pack(bfloat16(8, 32), None), bfloat16(0, 32)).shape == (0, 8)
