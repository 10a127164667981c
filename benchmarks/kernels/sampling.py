"""Draws from logits: bytes are those of reading the logits once, though masks need them several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cpu.sampler import make_logits, make_sequences
from benchmarks.kernels.case import KernelCase
from eventlm.kernels.gpu.draw_masked import draw_masked
from eventlm.kernels.gpu.draw_tokens import draw_tokens
from eventlm.worker.gpu.sampler import GpuSampler
from eventlm.worker.sampling.sampler import Sampler

VOCAB_SIZE = 151_936


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Batches of rows that all draw in the same way."""
    vocab_size = 3000 if smoke else VOCAB_SIZE
    for num_rows in (2,) if smoke else (1, 64, 256):
        logits = make_logits(num_rows, vocab_size, torch.bfloat16).to(device)
        for way in WAYS:
            sampler = GpuSampler(vocab_size, device)
            reference = Sampler(vocab_size, device)
            sequences = make_sequences(num_rows, vocab_size, way.params)
            for each in sequences:
                sampler.table.add(each)
                reference.table.add(each)
            draws = torch.from_numpy(sampler.stage(sequences).draws).to(device)
            yield KernelCase(
                name=f"{way.draw.__name__} {way.name} S={num_rows}",
                run=partial(_run, way.draw, logits, draws),
                reference=partial(_reference, reference, logits, sequences),
                num_bytes=logits.nbytes,
                tolerance=0.0,
                peer=partial(way.peer, logits),
                peer_name=way.peer_name,
                target=way.target if num_rows >= 64 else 0.0,
                peer_target=way.peer_target if num_rows >= 64 else 0.0,
            )


class Way(NamedTuple):
    """A way to draw, how it is usually written, and how far it should get."""

    name: str
    params: dict[str, Any]
    draw: Callable[[Tensor, Tensor, Tensor], None]
    peer: Callable[[Tensor], Tensor]
    peer_name: str
    target: float = 0.0
    peer_target: float = 0.0


def torch_free(logits_SV: Tensor) -> Tensor:
    """At temperature 0.8; by random numbers that depend on the batch, as below."""
    return _race((logits_SV.float() / 0.8).softmax(dim=-1))


def torch_top_k(logits_SV: Tensor) -> Tensor:
    """Of the 50 largest, at temperature 0.8."""
    top = logits_SV.float().topk(50, dim=-1)
    return top.indices.gather(1, _race((top.values / 0.8).softmax(dim=-1))[:, None])[:, 0]


def torch_top_p(logits_SV: Tensor) -> Tensor:
    """Of 0.9 of the probability, at temperature 0.8, found by sorting the vocabulary."""
    order = (logits_SV.float() / 0.8).sort(dim=-1, descending=True)
    probabilities = order.values.softmax(dim=-1)
    probabilities.masked_fill_(probabilities.cumsum(dim=-1) - probabilities >= 0.9, 0.0)
    return order.indices.gather(1, _race(probabilities)[:, None])[:, 0]


WAYS = (
    Way("greedy", {"temperature": 0.0}, draw_tokens, partial(torch.argmax, dim=-1), "torch.argmax", target=0.5),
    Way("free", {"temperature": 0.8}, draw_tokens, torch_free, "torch softmax", peer_target=1.5),
    Way("top-k 50", {"temperature": 0.8, "top_k": 50}, draw_masked, torch_top_k, "torch topk"),
    Way("top-p 0.9", {"temperature": 0.8, "top_p": 0.9}, draw_masked, torch_top_p, "torch sort", peer_target=5.0),
)


def _race(probabilities: Tensor) -> Tensor:
    return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def _run(draw: Callable[[Tensor, Tensor, Tensor], None], logits_SV: Tensor, draws_S6: Tensor) -> Tensor:
    out = torch.empty(len(logits_SV), dtype=torch.int32, device=logits_SV.device)
    draw(logits_SV, draws_S6, out)
    return out


def _reference(sampler: Sampler, logits_SV: Tensor, sequences: list[Any]) -> Tensor:
    """As the worker's sampler in torch draws them."""
    return torch.from_numpy(sampler.sample(logits_SV, sequences)).to(logits_SV.device)
