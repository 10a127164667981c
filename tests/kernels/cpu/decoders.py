"""Small decoders with random weights, in the compiled forward pass and in torch's, and steps over them."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eventlm.kernels.cpu.decoder import CpuDecoder, DecoderRow
from eventlm.kernels.kv_quantization import SCALE_BYTES, STORED_DTYPES
from eventlm.models.config import DecoderConfig, read_config
from eventlm.models.decoder import Decoder
from eventlm.models.loader import load_cpu_decoder, load_decoder
from eventlm.models.rope import RopeTable


class Shape(NamedTuple):
    """What a small model can differ in. `qk_norm` makes it a Qwen3."""

    hidden: int = 64
    inner: int = 160
    vocab: int = 384
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    num_layers: int = 2


def write_checkpoint(folder: Path, shape: Shape, *, max_positions: int = 4096, dtype: str = "bfloat16") -> Path:
    """A checkpoint's folder without a tokenizer. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_theta": 10000.0,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(shape, getattr(torch, dtype)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, num_out: int, num_in: int, *, bias: bool = False) -> None:
        values = torch.empty(num_out, num_in, dtype=dtype)
        tensors[f"{name}.weight"] = values.normal_(std=1.5 * num_in**-0.5, generator=generator)
        if bias:
            tensors[f"{name}.bias"] = (0.5 * torch.randn(num_out, generator=generator)).to(dtype)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = (0.5 + torch.rand(size, generator=generator)).to(dtype)

    matrix("model.embed_tokens", shape.vocab, shape.hidden)
    norm("model.norm", shape.hidden)
    if not shape.tied:
        matrix("lm_head", shape.vocab, shape.hidden)
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", shape.hidden)
        norm(f"{prefix}.post_attention_layernorm", shape.hidden)
        for name, num_out in (("q", query), ("k", key), ("v", key)):
            matrix(f"{prefix}.self_attn.{name}_proj", num_out, shape.hidden, bias=shape.attention_bias)
        matrix(f"{prefix}.self_attn.o_proj", shape.hidden, query, bias=shape.attention_bias)
        if shape.qk_norm:
            norm(f"{prefix}.self_attn.q_norm", shape.head_dim)
            norm(f"{prefix}.self_attn.k_norm", shape.head_dim)
        for name in ("gate", "up"):
            matrix(f"{prefix}.mlp.{name}_proj", shape.inner, shape.hidden, bias=shape.mlp_bias)
        matrix(f"{prefix}.mlp.down_proj", shape.hidden, shape.inner, bias=shape.mlp_bias)
    return tensors


class Computed(NamedTuple):
    """Of each token of a sequence: the residual stream behind the last layer, and the logits."""

    hidden_TH: Tensor
    logits_TV: Tensor


class TorchDecoder:
    """Whole sequences in torch, without a cache."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.decoder: Decoder = load_decoder(folder, dtype=dtype)
        self._config = read_config(folder)
        self._dtype = getattr(torch, dtype)

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int]) -> Computed:
        """One sequence from its beginning."""
        count = len(token_ids)
        rope = RopeTable(self._config, count, dtype=self._dtype, device=torch.device("cpu"))
        hidden_TH = self.decoder.forward(torch.tensor(token_ids), torch.arange(count), rope, _attend_causally)
        return Computed(hidden_TH.float(), self.decoder.logits(hidden_TH).float())


def _attend_causally(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    group = q_THD.shape[1] // k_TKD.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q_THD, k_TKD, v_TKD))
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


class Piece(NamedTuple):
    """Tokens [start, end) of a sequence, one row of a step."""

    sequence: int
    start: int
    end: int


class CompiledDecoder:
    """Sequences over a cache that begins as NaN."""

    def __init__(
        self,
        folder: Path,
        build: str,
        *,
        quantization: str = "none",
        kv_dtype: str = "bfloat16",
        block_size: int = 16,
        num_blocks: int = 64,
        num_threads: int = 1,
    ) -> None:
        config: DecoderConfig = read_config(folder)
        self.decoder: CpuDecoder = load_cpu_decoder(
            folder, build, quantization=quantization, max_positions=4096, num_threads=num_threads
        )
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size)
        if kv_dtype == "bfloat16":
            self._kv = torch.full((*shape, config.head_dim), torch.nan, dtype=torch.bfloat16)
        else:
            garbage = torch.full((*shape, config.head_dim + SCALE_BYTES), 0xFF, dtype=torch.uint8)
            self._kv = garbage.view(STORED_DTYPES[kv_dtype])
        self._block_size = block_size

    def step(self, sequences: Sequence[Sequence[int]], tables: Sequence[list[int]], pieces: Sequence[Piece]) -> Tensor:
        """The residual stream of the pieces' tokens, [T, H]. tables: blocks of each sequence."""
        token_ids = [token for piece in pieces for token in sequences[piece.sequence][piece.start : piece.end]]
        rows = [
            DecoderRow(
                piece.start,
                piece.end - piece.start,
                array("i", tables[piece.sequence][: -(-piece.end // self._block_size)]),
            )
            for piece in pieces
        ]
        return self.decoder.forward(token_ids, rows, self._kv)

    def run(
        self, sequences: Sequence[Sequence[int]], tables: Sequence[list[int]], steps: Sequence[Sequence[Piece]]
    ) -> list[Computed]:
        """What each sequence's tokens got, in their order; tokens of a prefix that it shares get nothing."""
        hidden: list[list[Tensor]] = [[] for _ in sequences]
        logits: list[list[Tensor]] = [[] for _ in sequences]
        for pieces in steps:
            counts = [piece.end - piece.start for piece in pieces]
            step_TH = self.step(sequences, tables, pieces)
            step_TV = self.decoder.logits(step_TH)
            for piece, own_TH, own_TV in zip(pieces, step_TH.split(counts), step_TV.split(counts), strict=True):
                hidden[piece.sequence].append(own_TH)
                logits[piece.sequence].append(own_TV)
        return [Computed(torch.cat(own), torch.cat(rows)) for own, rows in zip(hidden, logits, strict=True)]


def random_sequences(shape: Shape, lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Token ids, the first and the last of the vocabulary among them."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(shape.vocab) for _ in range(length)] for length in lengths]
    sequences[0][0], sequences[-1][-1] = 0, shape.vocab - 1
    return sequences


def scattered_tables(lengths: Sequence[int], block_size: int, num_blocks: int) -> list[list[int]]:
    """Blocks of each sequence's own, in no order."""
    free = list(range(num_blocks))
    random.Random(1).shuffle(free)
    return [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]


def random_steps(lengths: Sequence[int], starts: Sequence[int], *, seed: int) -> list[list[Piece]]:
    """Whole prompts, chunks of all sizes and single tokens in the same steps, until each sequence is at its end."""
    rng = random.Random(seed)
    indices = list(starts)
    steps = []
    while any(index < length for index, length in zip(indices, lengths, strict=True)):
        pieces = []
        for sequence, length in enumerate(lengths):
            rest = length - indices[sequence]
            if rest and rng.random() < 0.8:
                count = rng.choice((rest, 1, 1, min(rest, rng.randint(1, 40))))
                pieces.append(Piece(sequence, indices[sequence], indices[sequence] + count))
                indices[sequence] += count
        if pieces:
            steps.append(pieces)
    return steps


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences over that of what is expected; NaN if anything is."""
    return float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


def only(computed: Any) -> Computed:
    """Of a run with a single sequence."""
    [one] = computed
    return Computed(*one)
