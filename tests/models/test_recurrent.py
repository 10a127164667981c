"""Against the same written down one number after the other, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from msgspec import structs
from torch import Tensor

from eventlm.kernels.sequence_states import StateRow, StepStates
from eventlm.models.recurrent import DeltaWeights, convolve_gated, decays_of, gated_delta
from eventlm.models.spec import ConvolutionSpec, DeltaSpec, RecurrentSpec

NUM_TOKENS = 11
CONVOLUTION = ConvolutionSpec(num_channels=3, num_taps=4, has_bias=True)
DELTA = DeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=2, num_taps=3)
#: How the tokens come: rows of steps.
CUTS = [[11], [1, 1, 9], [4, 7], [10, 1]]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_pieces(
    spec: RecurrentSpec, cut: Sequence[int], compute: Callable[[slice, StepStates, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """What the tokens get in several steps, and the state at the end, which is a part of its slot."""
    memory, first, outputs = torch.full((2, spec.state_size + 2), torch.nan), 0, []
    for count in cut:
        states = StepStates(memory, [StateRow(count, slot=1, source=1 if first else -1)])
        outputs.append(compute(slice(first, first + count), states, 2))
        first += count
    assert memory[0].isnan().all()
    assert memory[1, :2].isnan().all()
    return torch.cat(outputs), memory[1, 2:]


def convolved(inputs: Tensor, taps_CN: Tensor, channel: int, token: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    num_taps = taps_CN.shape[1]
    for tap in range(num_taps):
        place = token - num_taps + 1 + tap
        if place >= 0:
            total = total + taps_CN[channel, tap].double() * inputs[place, channel].double()
    return total


@pytest.mark.parametrize("cut", CUTS)
def test_convolutions(cut: list[int]) -> None:
    mixed, taps_CN, bias_C = random(NUM_TOKENS, 9, seed=0), random(3, 4, seed=1), random(3, seed=2)
    found, state = in_pieces(
        CONVOLUTION,
        cut,
        lambda tokens, states, first: convolve_gated(CONVOLUTION, mixed[tokens], taps_CN, bias_C, states, first),
    )
    inputs = mixed[:, :3] * mixed[:, 6:]
    for token in range(NUM_TOKENS):
        for channel in range(3):
            total = convolved(inputs, taps_CN, channel, token) + bias_C[channel]
            assert float(found[token, channel]) == pytest.approx(float(mixed[token, 3 + channel] * total), abs=1e-5)
    assert torch.equal(state.view(3, 3), inputs[-3:])


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_the_delta_rule(cut: list[int], is_interleaved: bool) -> None:
    spec = structs.replace(DELTA, is_interleaved=is_interleaved)
    channels, eps = spec.num_channels, 0.1
    mixed, taps_CN, scale_V = random(NUM_TOKENS, channels, seed=0), random(channels, 3, seed=1), random(2, seed=2)
    decays_TH, betas_TH = random(NUM_TOKENS, 4, seed=3).sigmoid(), random(NUM_TOKENS, 4, seed=4).sigmoid()
    found, state = in_pieces(
        spec,
        cut,
        lambda tokens, states, first: gated_delta(
            spec,
            mixed[tokens],
            taps_CN,
            DeltaWeights(scale_V, decays_TH[tokens], betas_TH[tokens]),
            states,
            first,
            eps,
        ),
    )
    assert torch.equal(state[: 2 * channels].view(2, channels), mixed[-2:])
    matrices = state[2 * channels :].view(4, 3, 2)
    for head in range(4):
        key_head = head % 2 if is_interleaved else head // 2
        matrix = torch.zeros(3, 2, dtype=torch.float64)
        for token in range(NUM_TOKENS):
            vectors = []
            for first, size in ((key_head * 3, 3), (6 + key_head * 3, 3), (12 + head * 2, 2)):
                sums = torch.stack([convolved(mixed, taps_CN, first + i, token) for i in range(size)])
                vectors.append(sums * sums.sigmoid())
            query, key, value = vectors
            query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (query, key))
            matrix = decays_TH[token, head].double() * matrix
            matrix = matrix + betas_TH[token, head].double() * torch.outer(key, value - key @ matrix)
            given = query / 3**0.5 @ matrix
            expected = given / (given.square().mean() + eps).sqrt() * scale_V
            assert found[token].view(4, 2)[head].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert matrices[head].flatten().tolist() == pytest.approx(matrix.flatten().tolist(), abs=1e-5)


def test_decays() -> None:
    found = decays_of(torch.tensor([[1.0, -2.0]]), torch.tensor([0.5, 0.1]), torch.tensor([-1.0, 3.0]))
    rates = torch.tensor([0.5, 0.1]).exp()
    softplus = torch.tensor([0.0, 1.0]).exp().log1p()
    assert torch.allclose(found, (-rates * softplus).exp()[None])
