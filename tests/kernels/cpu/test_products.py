from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from eventlm.kernels.cpu.products import MatrixGroup, Products

#: Of bfloat16, whose last bit is rounded.
TOLERANCE = 1 / 128


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_in", [64, 40, 7, 130])
def test_products(builds: list[str], num_in: int, num_threads: int) -> None:
    """Of one matrix, and of several, some with a bias."""
    sizes = (96, 50, 33, 1)
    weights = [bfloat16(num_out, num_in) for num_out in sizes]
    biases = [None, bfloat16(50).float(), None, bfloat16(1).float()]
    for build in builds:
        products = Products(build, [(num_out, num_in) for num_out in sizes], num_threads=num_threads)
        matrices = [products.pack(*each) for each in zip(weights, biases, strict=True)]
        for first, last in ((0, 1), (3, 4), (0, 4)):
            group = MatrixGroup(matrices[first:last])
            for num_rows in (1, 3, 17, 70):
                x = bfloat16(2, num_rows, num_in)
                outs = products.multiply(group, x)
                for out, weight, bias in zip(outs, weights[first:last], biases[first:last], strict=True):
                    expected = linear(x.float(), weight.float(), bias)
                    error = (out.float() - expected).abs().max()
                    assert error <= TOLERANCE * expected.abs().max(), (build, num_rows)


def test_a_row_does_not_depend_on_the_others(builds: list[str]) -> None:
    x = bfloat16(65, 96)
    for build in builds:
        if build == "amx":
            continue
        products = Products(build, [(80, 96)], num_threads=2)
        group = MatrixGroup([products.pack(bfloat16(80, 96), None)])
        alone = torch.cat([products.multiply(group, row[None])[0] for row in x])
        assert torch.equal(products.multiply(group, x)[0], alone), build


def test_a_row_does_not_depend_on_those_of_wider_matrices(builds: list[str]) -> None:
    """Not even on numbers that are none, where it ends before a tile does."""
    for build in builds:
        products = Products(build, [(32, 80), (32, 96)], num_threads=1)
        narrow, wide = (MatrixGroup([products.pack(bfloat16(32, num_in), None)]) for num_in in (80, 96))
        x = bfloat16(3, 80)
        before = products.multiply(narrow, x)[0]
        products.multiply(wide, torch.full((3, 96), torch.nan, dtype=torch.bfloat16))
        assert torch.equal(products.multiply(narrow, x)[0], before), build


def test_no_rows(builds: list[str]) -> None:
    products = Products(builds[0], [(8, 32)], num_threads=1)
    group = MatrixGroup([products.pack(bfloat16(8, 32), None)])
    assert products.multiply(group, bfloat16(0, 32))[0].shape == (0, 8)


def test_a_matrix_without_room(builds: list[str]) -> None:
    products = Products(builds[0], [(32, 64)], num_threads=1)
    products.pack(bfloat16(32, 64), None)
    with pytest.raises(AssertionError, match="room"):
        products.pack(bfloat16(32, 64), None)


@pytest.mark.parametrize("shape", [(1, 1, 48), (2, 700, 96), (3, 0, 16)])
def test_norms(builds: list[str], shape: tuple[int, ...]) -> None:
    x, weight = bfloat16(*shape), bfloat16(shape[-1]).float()
    expected = x.float() / (x.float().square().mean(-1, keepdim=True) + 0.5).sqrt() * weight
    for build in builds:
        out = Products(build, [(1, 1)], num_threads=2).norm(x, weight, 0.5)
        assert out.shape == expected.shape
        assert torch.allclose(out.float(), expected, rtol=2**-8, atol=0), build


@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 64), (5, 40), (3, 8), (300, 64)])
def test_rotations(builds: list[str], num_tokens: int, head_dim: int) -> None:
    cosines, sines = bfloat16(num_tokens, head_dim), bfloat16(num_tokens + 1, head_dim)[1:]
    by_head = bfloat16(3, num_tokens, head_dim)
    by_token = bfloat16(num_tokens, 3, head_dim).transpose(0, 1)
    for x in (by_head, by_token, bfloat16(3, num_tokens, 2 * head_dim)[..., :head_dim]):
        first, second = x.float().chunk(2, dim=-1)
        expected = x.float() * cosines.float() + torch.cat((-second, first), dim=-1) * sines.float()
        for build in builds:
            out = Products(build, [(1, 1)], num_threads=2).rotate(x, cosines, sines)
            assert out.transpose(0, 1).is_contiguous()
            assert torch.allclose(out.float(), expected, rtol=2**-8, atol=1e-6), build
