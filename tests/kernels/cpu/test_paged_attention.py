"""The compiled attention that stores what it is given, beside the one in torch's operations, in float32."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eventlm.kernels import host_memory
from eventlm.kernels.cpu.decoder import DecoderRow, KVLayers
from eventlm.kernels.cpu.paged_attention import CompiledAttention, LayerAttention
from eventlm.kernels.cpu.products import Products
from eventlm.kernels.kv_quantization import SCALE_BYTES
from eventlm.kernels.kv_store import head_slots, kv_store
from eventlm.kernels.paged_attention import AttentionRow, paged_attention, plan_attention

BLOCK_SIZE, NUM_BLOCKS = 16, 160
#: A prompt, a decode, one whose context takes two passes, and a chunk: (start, tokens).
ROWS = ((0, 21), (37, 1), (1100, 1), (64, 5))
PLAIN = LayerAttention(num_heads=6, num_kv_heads=2, key_size=32, value_size=32, head_dim=32)
#: As a share of the largest, by how keys and values are kept.
TOLERANCE = {torch.bfloat16: 0.015, torch.int8: 0.02, torch.uint8: 0.06}


def tables() -> list[array[int]]:
    """Of each row other blocks, in no order."""
    numbers = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    found = []
    for start, count in ROWS:
        needed = -(-(start + count) // BLOCK_SIZE)
        found.append(array("i", numbers[:needed]))
        numbers = numbers[needed:]
    return found


class Case:
    """Queries, keys and values of the rows' whole sequences, and what the rows must see."""

    def __init__(self, layer: LayerAttention) -> None:
        self.layer = layer
        generator = torch.Generator().manual_seed(5)
        sizes = ((layer.num_heads, layer.key_size), (layer.num_kv_heads, layer.key_size))
        shapes = (*sizes, (layer.num_kv_heads, layer.value_size))
        self.given = [
            [torch.randn((heads, start + count, size), generator=generator).bfloat16() for heads, size in shapes]
            for start, count in ROWS
        ]

    def step(self, rows: list[int], first: list[int], last: list[int]) -> list[Tensor]:
        """Queries, keys and values of these tokens of each row, [heads, T, size]."""
        parts = [
            [given[:, begin:end] for given in self.given[row]]
            for row, begin, end in zip(rows, first, last, strict=True)
        ]
        return [torch.cat(of, dim=1) for of in zip(*parts, strict=True)]

    def expected(self, options: dict[str, Any]) -> Tensor:
        layer, size = self.layer, self.layer.head_dim
        cache = torch.zeros(2, NUM_BLOCKS, layer.num_kv_heads, BLOCK_SIZE, size)
        for (start, count), table, (_, *stored) in zip(ROWS, tables(), self.given, strict=True):
            places = torch.arange(start + count)
            slots = torch.tensor(table)[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
            k, v = (torch.nn.functional.pad(x.float(), (0, size - x.shape[-1])).transpose(0, 1) for x in stored)
            slots = head_slots(slots, block_size=BLOCK_SIZE, num_kv_heads=layer.num_kv_heads)
            kv_store(cache, k.contiguous(), v.contiguous(), slots)
        rows = [AttentionRow(*row, np.array(table)) for row, table in zip(ROWS, tables(), strict=True)]
        q = self.step(list(range(len(ROWS))), [start for start, _ in ROWS], [sum(row) for row in ROWS])[0]
        q = torch.nn.functional.pad(q.float(), (0, size - q.shape[-1])).transpose(0, 1).contiguous()
        groups = plan_attention(rows, cache, torch.float32, [layer.window])
        return paged_attention(q, cache, groups, window=layer.window, **options)[..., : layer.value_size]


def make_attention(
    build: str, layer: LayerAttention, dtype: torch.dtype = torch.bfloat16, num_threads: int = 2
) -> CompiledAttention:
    """Of two layers, of which the first is never called."""
    products = Products(build, [(1, 1)], num_threads=num_threads)
    width = layer.head_dim + (0 if dtype is torch.bfloat16 else SCALE_BYTES)
    cache = host_memory.empty((2, NUM_BLOCKS, layer.num_kv_heads, BLOCK_SIZE, width), dtype)
    # NaN, or what makes one of scales, where nothing is stored.
    cache.view(torch.uint8).fill_(255)
    return CompiledAttention(build, products, KVLayers([None, cache]), [layer, layer])


def run(attention: CompiledAttention, case: Case, numbers: list[int], options: dict[str, Any]) -> Tensor:
    """What these rows give, after the tokens before them have been stored."""
    for number in numbers:
        start = ROWS[number][0]
        if start:
            attention.begin([DecoderRow(0, start, tables()[number])])
            attention.attend(1, *case.step([number], [0], [start]), **options)
    rows = [DecoderRow(*ROWS[number], tables()[number]) for number in numbers]
    attention.begin(rows)
    given = case.step(numbers, [row.start for row in rows], [row.start + row.num_tokens for row in rows])
    return attention.attend(1, *given, **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("layer", "soft_cap", "has_sinks"),
    [
        (PLAIN, 0.0, False),
        (PLAIN._replace(window=19), 3.0, True),
        # Latent attention, whose values are smaller than its keys; and values of no whole vector.
        (LayerAttention(num_heads=3, num_kv_heads=3, key_size=48, value_size=32, head_dim=48), 0.0, False),
        (LayerAttention(num_heads=4, num_kv_heads=2, key_size=24, value_size=32, head_dim=32), 0.0, False),
        (LayerAttention(num_heads=4, num_kv_heads=1, key_size=32, value_size=24, head_dim=32), 0.0, True),
    ],
)
def test_it_is_torch_s(
    builds: list[str], layer: LayerAttention, soft_cap: float, has_sinks: bool, dtype: torch.dtype
) -> None:
    case = Case(layer)
    sinks = torch.linspace(-1, 2, layer.num_heads).bfloat16() if has_sinks else None
    options = {"scale": 0.3, "soft_cap": soft_cap, "sinks_H": sinks}
    expected = case.expected(options)
    for build in builds:
        out = run(make_attention(build, layer, dtype), case, [0, 1, 2, 3], options)
        assert out.dtype is torch.bfloat16
        assert out.shape == expected.shape
        error = (out.float() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[dtype], (build, float(error))


def test_a_row_does_not_depend_on_the_others_nor_on_threads(builds: list[str]) -> None:
    case, options = Case(PLAIN), {"scale": 0.3, "soft_cap": 0.0, "sinks_H": None}
    for build in builds:
        if build == "amx":
            # Tiles round otherwise, and which rows take them depends on their number.
            continue
        together = run(make_attention(build, PLAIN), case, [0, 1, 2, 3], options)
        alone = [run(make_attention(build, PLAIN, num_threads=1), case, [number], options) for number in range(4)]
        assert torch.equal(together, torch.cat(alone)), build


def test_how_queries_lie_and_their_dtype(builds: list[str]) -> None:
    """As transformers' models give them: one token after the other, part of something, or in float32."""
    case, options = Case(PLAIN), {"scale": 0.3, "soft_cap": 0.0, "sinks_H": None}
    attention = make_attention(builds[0], PLAIN)
    expected = run(attention, case, [0], options)
    given = case.step([0], [0], [ROWS[0][1]])
    by_token = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given]
    parts = [torch.cat((x, x), dim=-1)[..., : x.shape[-1]] for x in given]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    for variant in (by_token, parts, turned):
        assert torch.equal(attention.attend(1, *variant, **options), expected)
    exact = attention.attend(1, *(x.float() for x in given), **options)
    assert exact.dtype is torch.float32
    assert torch.equal(exact.bfloat16(), expected)
