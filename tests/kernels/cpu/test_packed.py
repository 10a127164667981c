"""Matrices of codes: what they hold is what gguf-py says, and products are what their integers give."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from msgspec import structs
from torch import Tensor

from eventlm.kernels.cpu.decoder import CpuDecoder, DecoderRow, KVLayers
from eventlm.kernels.cpu.native import PACKED_TYPES, Instruction, NativeModel, NativeShape, packed_bytes
from eventlm.models.program import WeightKey
from eventlm.models.spec import (
    AttentionSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from eventlm.models.weights.decoder_weights import model_weights
from tests.kernels.cpu.decoders import (
    CompiledDecoder,
    Piece,
    TorchDecoder,
    Weighted,
    only,
    random_sequences,
    relative_error,
    scattered_tables,
)

#: Outputs and inputs: whole panels and parts of one, blocks of activations that are not full.
SIZES = [(97, 256), (31, 768), (64, 1024), (33, 32), (65, 672)]
#: Where a block has fp16.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
#: With a float32, a zero, and perhaps a last block that is not full.
INTEGERS = ("I4_32", "I4_128", "I8_32", "I8_128")
FLOATS = "F8_128"
#: Tokens of one step.
COUNTS = (1, 2, 3, 4, 5, 8, 16, 17, 33, 100)


def random_blocks(kind: str, num_out: int, num_in: int, *, size: float = 0.02) -> Tensor:
    """Rows of blocks with random codes, uint8 [out, bytes]. `size`: of the scales."""
    _, inputs, num_bytes = PACKED_TYPES[kind]
    rng = np.random.default_rng(num_out * num_in)
    blocks = rng.integers(0, 256, (num_out, -(-num_in // inputs), num_bytes), dtype=np.uint8)
    blocks[0], blocks[1] = 255, 0
    for first in HALVES.get(kind, ()):
        halves = (rng.standard_normal(blocks.shape[:2]) * size).astype(np.float16)
        blocks[:, :, first : first + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = rng.integers(0, 130, blocks.shape[:2])
    if kind == FLOATS:
        # Two of the codes are no numbers.
        blocks[blocks % 128 == 127] = 100
    if kind in (*INTEGERS, FLOATS):
        blocks[:, :, :4] = (rng.standard_normal(blocks.shape[:2]) * size).astype(np.float32)[..., None].view(np.uint8)
    if kind in INTEGERS:
        zeros = rng.integers(0, 16 if kind.startswith("I4") else 256, blocks.shape[:2])
        blocks[:, :, 4:6] = zeros.astype(np.float16)[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_out, -1))


def values_of(kind: str, blocks: Tensor) -> Tensor:
    """What gguf-py makes of them, or the formula of a scale and a zero, float32 [out, in]."""
    if kind == FLOATS:
        each = blocks.view(len(blocks), -1, 132)
        # The scales are 256 times what they are for numbers.
        return (
            each[..., :4].contiguous().view(torch.float32) / 256 * each[..., 4:].view(torch.float8_e4m3fn).float()
        ).flatten(1)
    if kind in INTEGERS:
        each = blocks.numpy().reshape(len(blocks), -1, PACKED_TYPES[kind].block_bytes)
        codes = each[..., 6:]
        if kind.startswith("I4_"):
            codes = np.stack((codes % 16, codes // 16), axis=-1).reshape(*codes.shape[:2], -1)
        scales, zeros = each[..., :4].copy().view(np.float32), each[..., 4:6].copy().view(np.float16)
        return torch.from_numpy((scales * (codes.astype(np.float32) - zeros)).reshape(len(blocks), -1))
    return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind]))


def one_matrix(build: str, kind: str, num_out: int, num_in: int, *, num_threads: int = 1) -> CpuDecoder:
    """A decoder that has nothing but an embedding, which is the output matrix as well."""
    shape = NativeShape(vocab_size=num_out, hidden_size=num_in, num_layers=1, is_tied=1)
    shape.logits_multiplier, shape.eps = 1.0, 1e-5
    model = NativeModel(shape, [Instruction(kind=0, multiplier=1.0)], 0.0)
    return CpuDecoder(build, model, [], types={("embedding", 0, -1): kind}, num_threads=num_threads)


def loaded(build: str, kind: str, blocks: Tensor, num_in: int, *, num_threads: int = 1) -> CpuDecoder:
    decoder = one_matrix(build, kind, len(blocks), num_in, num_threads=num_threads)
    for first in range(0, len(blocks), 32):
        decoder.load_packed("embedding", 0, blocks[first : first + 32], first)
    return decoder


def held(decoder: CpuDecoder, num_out: int) -> Tensor:
    """The matrix as it is looked up, float32 [out, in]."""
    kv = KVLayers([torch.zeros(2, 1, 1, 16, 16, dtype=torch.bfloat16)])
    return decoder.forward(range(num_out), [DecoderRow(0, num_out, array("i", [0]))], kv)


def as_integers(rows: Tensor) -> Tensor:
    """Rows as products take them: bfloat16 and then int8 with a scale for 32 inputs; float64."""
    values = rows.bfloat16().float()
    for first in range(0, values.shape[1], 32):
        block = values[:, first : first + 32]
        largest = block.abs().amax(1, keepdim=True)
        # `127 / largest` would be rounded twice.
        integers = torch.round(block * torch.tensor(127.0).div(largest))
        values[:, first : first + 32] = integers * (largest / 127)
        assert integers.abs().amax() <= 127
    return values.double()


def widened_from(kind: str) -> int:
    """From how many rows on `amx` widens codes to bfloat16."""
    if kind == FLOATS:
        return 16
    return 40 if kind in ("Q6_K", "Q8_0", "I8_32", "I8_128") else 32


def cases(kind: str) -> list[tuple[int, int]]:
    return [size for size in SIZES if kind in (*INTEGERS, FLOATS) or size[1] % PACKED_TYPES[kind].block_inputs == 0]


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_values_are_those_of_the_file(builds: list[str], kind: str) -> None:
    """Bit for bit."""
    for (num_out, num_in), build in itertools.product(cases(kind), builds):
        blocks = random_blocks(kind, num_out, num_in)
        found = held(loaded(build, kind, blocks, num_in, num_threads=2), num_out)
        expected = values_of(kind, blocks)[:, :num_in].contiguous()
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (build, num_out, num_in)


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_products(builds: list[str], kind: str) -> None:
    """What the integers give, or the widened codes, and near to what their floats would; a row's bits are the same
    among any number of rows that are multiplied alike, and with any number of threads.
    """
    for (num_out, num_in), build in itertools.product(cases(kind), builds):
        blocks = random_blocks(kind, num_out, num_in)
        weight = values_of(kind, blocks)[:, :num_in]
        rows = torch.randn(max(COUNTS), num_in, generator=torch.Generator().manual_seed(num_in))
        # The largest integers, of one sign.
        rows[-1], rows[-2] = 1, -1
        decoder, threads = loaded(build, kind, blocks, num_in), loaded(build, kind, blocks, num_in, num_threads=3)
        normed = decoder.norm(rows)
        rounded = normed.bfloat16().double()
        of_integers = (rounded if kind == FLOATS else as_integers(normed)) @ weight.double().T
        of_widened = rounded @ weight.bfloat16().double().T
        for is_widened in (False, True):
            counts = [count for count in COUNTS if (build == "amx" and count >= widened_from(kind)) == is_widened]
            if not counts:
                continue
            found = decoder.logits(rows[-counts[-1] :])
            expected = (of_widened if is_widened else of_integers)[-counts[-1] :]
            size = expected.square().mean().sqrt()
            assert ((found - expected).abs().max() / size) < 1e-4, (build, num_out, num_in)
            exact = normed[-counts[-1] :].double() @ weight.double().T
            assert relative_error(found, exact.float()) < 0.01, (build, num_out, num_in)
            for count in counts:
                assert torch.equal(decoder.logits(rows[-count:]), found[-count:]), (build, num_out, num_in, count)
            assert torch.equal(threads.logits(rows[-counts[-1] :]), found), (build, num_out, num_in)


@pytest.mark.parametrize(("num_out", "num_in"), [(2048, 4096), (33, 17408)])
def test_large_matrices(builds: list[str], num_out: int, num_in: int) -> None:
    """More panels of a unit, or more inputs of a panel, than are widened together."""
    blocks = random_blocks("Q4_0", num_out, num_in)
    rows = torch.randn(70, num_in, generator=torch.Generator().manual_seed(1))
    weight = values_of("Q4_0", blocks)
    for build in builds:
        decoder = loaded(build, "Q4_0", blocks, num_in)
        for count in (40, 70):
            found, normed = decoder.logits(rows[:count]), decoder.norm(rows[:count])
            assert relative_error(found, normed @ weight.T) < 0.01, (build, count)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_so_in_its_row_alone(builds: list[str], value: float) -> None:
    for kind, build in itertools.product(("Q4_1", "Q6_K"), builds):
        decoder = loaded(build, kind, random_blocks(kind, 97, 768), 768)
        rows = torch.randn(50, 768, generator=torch.Generator().manual_seed(1))
        spoilt = rows.clone()
        spoilt[[0, 7, 18], [3, 100, 700]] = value
        is_whole = torch.ones(50, dtype=torch.bool)
        is_whole[[0, 7, 18]] = False
        found = decoder.logits(spoilt)
        assert found[~is_whole].isnan().all(), build
        assert torch.equal(found[is_whole], decoder.logits(rows)[is_whole]), build
        assert decoder.logits(rows).isfinite().all(), build


def test_scales_of_every_kind_are_read(builds: list[str]) -> None:
    """fp16 that is small, infinite or no number, and all of E8M0."""
    for build in builds:
        halves = torch.arange(65536).to(torch.int16).view(torch.uint8).view(2048, 32, 2)
        blocks = torch.full((2048, 32, 18), 0x79, dtype=torch.uint8)
        blocks[:, :, :2] = halves
        found, expected = (
            held(loaded(build, "Q4_0", blocks.view(2048, -1), 1024), 2048),
            values_of("Q4_0", blocks.view(2048, -1)),
        )
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), build
        powers = torch.full((32, 8, 17), 0x79, dtype=torch.uint8)
        powers[:, :, 0] = torch.arange(256).view(32, 8)
        found, expected = (
            held(loaded(build, "MXFP4", powers.view(32, -1), 256), 32),
            values_of("MXFP4", powers.view(32, -1)),
        )
        assert torch.equal(found, expected), build


def test_all_floats_of_8_bits_are_multiplied(builds: list[str]) -> None:
    """The small ones too, alone and among rows."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[127], codes[255] = 0, 128
    scales = torch.full((32, 2, 1), 256.0).view(torch.uint8)
    blocks = torch.cat((scales, codes.view(2, 128).expand(32, -1, -1)), dim=-1).flatten(1)
    for build in builds:
        decoder = loaded(build, FLOATS, blocks, 256)
        rows = torch.eye(256)
        expected = decoder.norm(rows).amax(1, keepdim=True).bfloat16().float() * values_of(FLOATS, blocks)[0][:, None]
        assert torch.equal(decoder.logits(rows), expected.expand(-1, 32)), build
        assert torch.equal(decoder.logits(rows[3:4]), expected[3:4].expand(-1, 32)), build


def test_numbers_are_rounded(builds: list[str]) -> None:
    """To codes whose error is smaller than that of the nearest codes between the least and the largest number."""
    weight = torch.randn(97, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = values_of("Q4_1", torch.from_numpy(quantize(weight.float().numpy(), GGMLQuantizationType.Q4_1)))
    for build in builds:
        decoder = one_matrix(build, "Q4_1", 97, 1024, num_threads=2)
        decoder.load("embedding", 0, weight)
        found = held(decoder, 97)
        assert relative_error(found, weight.float()) < 0.95 * relative_error(plain, weight.float()), build


def test_numbers_are_rounded_to_eight_bits(builds: list[str]) -> None:
    """To the nearest of what the largest number of a group, and fp16, allow."""
    weight = torch.randn(97, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[3, :64] = 0
    weight[4, 7], weight[5, 40] = torch.nan, torch.inf
    scales = weight.float().view(97, 32, 32).abs().amax(dim=2, keepdim=True) / 127
    for build in builds:
        decoder = one_matrix(build, "Q8_0", 97, 1024, num_threads=2)
        decoder.load("embedding", 0, weight)
        found, wanted = held(decoder, 97).view(97, 32, 32), weight.float().view(97, 32, 32)
        is_number = scales.isfinite().expand(97, 32, 32)
        # Half a step, and what fp16 takes from 127 of them.
        assert ((found - wanted).abs() <= 0.57 * scales)[is_number].all(), build
        assert not found[~is_number].isfinite().any(), build
        assert not found[3, :2].any(), build


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [("Q4_1", 20 * 32), ("Q8_0", 34 * 32), ("Q2_K", 164 * 4), ("Q3_K", 146 * 4), ("Q4_K", 148 * 4), ("Q6_K", 210 * 4)],
)
def test_bytes_of_a_matrix(builds: list[str], kind: str, num_bytes: int) -> None:
    """With scales and minima that are not packed as in the file, and whole panels."""
    assert builds
    assert packed_bytes(kind, 32, 1024) == 32 * num_bytes
    assert packed_bytes(kind, 33, 1024) == 64 * num_bytes


def test_groups_of_one_number_stay_that(builds: list[str]) -> None:
    """As nearly as fp16 has it; what is no number stays so too."""
    weight = torch.zeros(33, 64)
    weight[:32] = torch.linspace(-3, 3, 32)[:, None]
    weight[5, 33], weight[6, 1], weight[7, 2] = torch.nan, torch.inf, -torch.inf
    for build in builds:
        decoder = one_matrix(build, "Q4_1", 33, 64)
        decoder.load("embedding", 0, weight)
        found = held(decoder, 33)
        is_number = torch.ones(33, 2, dtype=torch.bool)
        is_number[[5, 6, 7], [1, 0, 0]] = False
        groups, expected = found.view(33, 2, 32), weight.bfloat16().float().view(33, 2, 32)
        assert torch.allclose(groups[is_number], expected[is_number], rtol=1e-3, atol=0), build
        assert not groups[~is_number].isfinite().any(), build
        logits = decoder.logits(torch.ones(2, 64))
        assert (~logits[0].isfinite()).nonzero()[:, 0].tolist() == [5, 6, 7]


LAYER = LayerSpec(
    attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=48, rope=RopeSpec(rotary_dim=48), scale=48**-0.5),
    feed_forward=FeedForwardSpec(size=288),
)


def model(*layers: LayerSpec, **changes: Any) -> ModelSpec:
    return ModelSpec(
        **{
            "architecture": "",
            "vocab_size": 333,
            "hidden_size": 256,
            "layers": layers,
            "norm": NormSpec(eps=1e-5),
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **changes,
        }
    )


UNGATED = structs.replace(LAYER, feed_forward=FeedForwardSpec(size=224, activation="relu2", is_gated=False))
BIASED = structs.replace(
    LAYER, attention=structs.replace(LAYER.attention, has_qkv_bias=True, qk_norm="whole"), norms="after"
)
#: Models, and types of their weights, by name or for all layers; what has none is bfloat16.
MIXES: dict[str, tuple[ModelSpec, dict[str | tuple[str, int], str]]] = {
    "one type": (
        model(LAYER, LAYER, tie_word_embeddings=True),
        dict.fromkeys(("query", "key", "value", "output", "gate", "up", "down", "embedding"), "Q4_0"),
    ),
    "another for values, gates and the output matrix": (
        model(LAYER, LAYER),
        {
            "query": "Q4_K",
            "key": "IQ4_XS",
            "value": "Q6_K",
            "output": "Q5_0",
            "gate": "Q4_K",
            "up": "Q5_K",
            "down": "Q8_0",
            "lm_head": "Q6_K",
            "embedding": "Q3_K",
        },
    ),
    "some matrices, and each layer its own": (
        model(LAYER, UNGATED, BIASED),
        {
            ("output", 0): "IQ4_NL",
            ("gate", 0): "MXFP4",
            ("up", 0): "Q4_1",
            ("up", 1): "Q2_K",
            ("down", 1): "Q5_1",
            ("query", 2): "Q2_K",
            ("key", 2): "Q4_K",
            ("value", 2): "Q5_K",
            ("output", 2): "I4_32",
            ("gate", 2): "F8_128",
            ("up", 2): "I4_128",
            ("down", 2): "I8_128",
            "lm_head": "Q4_K",
        },
    ),
    "more panels of a head than are widened together": (
        model(
            structs.replace(
                LAYER,
                attention=structs.replace(
                    LAYER.attention, head_dim=128, rope=RopeSpec(rotary_dim=128), scale=128**-0.5
                ),
            ),
            hidden_size=5120,
        ),
        dict.fromkeys(("query", "key", "value", "output", "gate", "up", "down"), "Q4_0"),
    ),
    "inputs of layers, values that are keys, and keys of another layer": (
        model(
            structs.replace(LAYER, attention=structs.replace(LAYER.attention, values_are_keys=True)),
            structs.replace(LAYER, attention=structs.replace(LAYER.attention, keys_of=0)),
            layer_inputs=LayerInputsSpec(size=64, vocab_size=340, activation="silu"),
        ),
        {
            "query": "Q4_K",
            "key": "Q8_0",
            "inputs_embedding": "Q5_0",
            "inputs_projection": "Q4_1",
            "input_gate": "Q5_K",
            ("input_up", 0): "I4_32",
        },
    ),
}


def with_blocks(spec: ModelSpec, types: dict[str | tuple[str, int], str]) -> tuple[Weighted, dict[WeightKey, Tensor]]:
    """Weights that the types can hold, and their blocks."""
    weights, blocks = {}, {}
    generator = torch.Generator().manual_seed(3)
    for key, shape in model_weights(spec).items():
        kind = types.get((key.name, key.layer), types.get(key.name))
        if kind is None or len(shape) == 1:
            values = torch.randn(shape, generator=generator)
            is_norm = len(shape) == 1 and key.kind == "weight"
            weights[key] = 0.5 + torch.rand(shape, generator=generator) if is_norm else values * shape[-1] ** -0.5
            continue
        one = random_blocks(kind, *shape)
        size = values_of(kind, one).nan_to_num(0).square().mean().sqrt()
        blocks[key] = random_blocks(kind, *shape, size=0.02 / float(size) * shape[1] ** -0.5)
        if kind == "MXFP4":
            blocks[key].view(shape[0], -1, 17)[:, :, 0] %= 4
            blocks[key].view(shape[0], -1, 17)[:, :, 0] += 118
        weights[key] = values_of(kind, blocks[key])[:, : shape[1]]
    return Weighted(spec, weights), blocks


@pytest.mark.parametrize("mix", MIXES)
def test_a_model(builds: list[str], mix: str) -> None:
    """Against torch in float32 with the same weights, as near as activations of 8 bits are."""
    spec, types = MIXES[mix]
    source, blocks = with_blocks(spec, types)
    [sequence] = random_sequences(spec.vocab_size, [140])
    expected = TorchDecoder(source, "float32").run(sequence)
    names = {
        (key.name, key.layer, key.expert): types.get((key.name, key.layer), types.get(key.name, "")) for key in blocks
    }
    # Units of products are others from 65 rows on.
    pieces = [[Piece(0, 0, 100)], [Piece(0, 100, 101)], [Piece(0, 101, 140)]]
    for build in builds:
        decoder = CompiledDecoder(source, build, types=names, blocks=blocks, num_threads=2)
        found = only(decoder.run([sequence], scattered_tables([140], 16, 64), pieces))
        assert 0.001 < relative_error(found.logits_TV, expected.logits_TV) < 0.03, build
