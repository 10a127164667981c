"""Small decoders with random weights, in the compiled forward pass and in torch's, and steps over them."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from eventlm.kernels.cpu.decoder import CpuDecoder, DecoderPeers, DecoderRow, KVLayers
from eventlm.kernels.kv_quantization import SCALE_BYTES, STORED_DTYPES
from eventlm.kernels.sequence_states import NO_STATES, StateRow, StepStates
from eventlm.models.config import read_model
from eventlm.models.cpu_kernels import native_model
from eventlm.models.decoder import Decoder
from eventlm.models.loader import load_cpu_decoder, load_decoder
from eventlm.models.program import WeightKey
from eventlm.models.rope import compiled_angles, rope_tables
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.slices import ModelPart

MAX_POSITIONS = 4096
_MAX_SEQUENCES = 8


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


class Weighted(NamedTuple):
    """A model with weights, all of them bfloat16: one that no checkpoint has."""

    model: ModelSpec
    weights: dict[WeightKey, Tensor]


def with_random_weights(model: ModelSpec) -> Weighted:
    """Norms multiply by about one, what is added is about as large as what it is added to."""
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for key, shape in model_weights(model).items():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            values *= 1.5 * shape[1] ** -0.5
        elif key.kind == "weight" and key.name != "sinks":
            values = 0.5 + torch.rand(shape, generator=generator) - model.norm.offset
        weights[key] = values.bfloat16()
    return Weighted(model, weights)


class Computed(NamedTuple):
    """Of each token of a sequence: the residual stream behind the last layer, and the logits."""

    hidden_TH: Tensor
    logits_TV: Tensor


class TorchDecoder:
    """Whole sequences in torch, without a cache. `source`: a checkpoint's folder, or a model with weights."""

    def __init__(self, source: Path | Weighted, dtype: str) -> None:
        self._dtype = getattr(torch, dtype)
        self.decoder = self._filled(source) if isinstance(source, Weighted) else load_decoder(source, dtype=dtype)

    def _filled(self, source: Weighted) -> Decoder:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            decoder = Decoder(source.model)
        finally:
            torch.set_default_dtype(before)
        for key, values in source.weights.items():
            decoder.target(key)[0].copy_(values)
        return decoder

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], change_kv: Callable[[Tensor], Tensor] = lambda x: x) -> Computed:
        """One sequence from its beginning. `change_kv` is what storing does to keys and values [T, K, D]."""
        count = len(token_ids)
        ropes = rope_tables(self.decoder.model, count, dtype=self._dtype, device=torch.device("cpu"))

        stored: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor | None, v_TKD: Tensor | None) -> Tensor:
            if k_TKD is not None and v_TKD is not None:
                stored[layer] = change_kv(k_TKD), change_kv(v_TKD)
            keys_of = self.decoder.model.attentions[layer].keys_of
            return self._attend(layer, q_THD, *stored[layer if keys_of < 0 else keys_of])

        hidden_TH = self.decoder.forward(torch.tensor(token_ids), torch.arange(count), ropes, attend)
        return Computed(hidden_TH.float(), self.decoder.logits(hidden_TH).float())

    def _attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Written down from `AttentionSpec`, one key-value head after the other."""
        spec, sinks_H = self.decoder.model.attentions[layer], self.decoder.sinks[layer]
        count, group = len(q_THD), spec.num_heads // spec.num_kv_heads
        places = torch.arange(count)
        distance = places[:, None] - places
        hidden_TT = (distance < 0) | (distance >= (spec.window or count))
        outputs = []
        for head in range(spec.num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            scores = torch.einsum("thd,sd->hts", q_THD[:, heads].float() * spec.scale, k_TKD[:, head].float())
            if spec.soft_cap:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            scores = scores.masked_fill(hidden_TT, -torch.inf)
            if sinks_H is not None:
                scores = torch.cat((scores, sinks_H[heads].float()[:, None, None].expand(-1, count, 1)), dim=-1)
            weights = scores.softmax(dim=-1)[..., :count].to(self._dtype)
            outputs.append(torch.einsum("hts,sd->thd", weights, v_TKD[:, head]))
        return torch.cat(outputs, dim=1)


class Piece(NamedTuple):
    """Tokens [start, end) of a sequence, one row of a step."""

    sequence: int
    start: int
    end: int


class CompiledDecoder:
    """Sequences over a cache and states that begin as NaN. `source`: a checkpoint's folder, or a model with weights."""

    def __init__(
        self,
        source: Path | Weighted,
        build: str,
        *,
        quantization: str = "none",
        kv_dtype: str = "bfloat16",
        block_size: int = 16,
        num_blocks: int = 64,
        num_threads: int = 1,
        types: Mapping[tuple[str, int, int], str] | None = None,
        blocks: Mapping[WeightKey, Tensor] | None = None,
        part: ModelPart | None = None,
        peers: DecoderPeers | None = None,
    ) -> None:
        """types, blocks, peers: see `CpuDecoder`. part: what it has of a checkpoint's model."""
        if isinstance(source, Weighted):
            model, ropes = source.model, [compiled_angles(rope, MAX_POSITIONS) for rope in source.model.ropes]
            native, is_int8 = native_model(model), quantization == "int8"
            self.decoder = CpuDecoder(
                build, native, ropes, is_int8=is_int8, types=types, peers=peers, num_threads=num_threads
            )
            for key, values in source.weights.items():
                if blocks and key in blocks:
                    self.decoder.load_packed(key.name, key.layer, blocks[key], expert=key.expert)
                else:
                    name = f"{key.name}_bias" if key.kind == "bias" else key.name
                    self.decoder.load(name, key.layer, values, expert=key.expert)
        else:
            model = read_model(source) if part is None else part.model
            self.decoder = load_cpu_decoder(
                source,
                build,
                quantization=quantization,
                max_positions=MAX_POSITIONS,
                num_threads=num_threads,
                part=part,
                peers=peers,
            )
        layers: list[Tensor | None] = []
        for attention in (layer.attention for layer in model.layers):
            if attention is None:
                layers.append(None)
                continue
            if attention.keys_of >= 0:
                layers.append(layers[attention.keys_of])
                continue
            num_heads, head_dim = attention.kv_shape
            shape = (2, num_blocks, num_heads, block_size)
            if kv_dtype == "bfloat16":
                layers.append(torch.full((*shape, head_dim), torch.nan, dtype=torch.bfloat16))
            else:
                garbage = torch.full((*shape, head_dim + SCALE_BYTES), 0xFF, dtype=torch.uint8)
                layers.append(garbage.view(STORED_DTYPES[kv_dtype]))
        self._kv = KVLayers(layers)
        self._block_size = block_size
        self._states = torch.full((_MAX_SEQUENCES, model.state_size), torch.nan)

    def step(
        self,
        sequences: Sequence[Sequence[int]],
        tables: Sequence[list[int]],
        pieces: Sequence[Piece],
        residual_TH: Tensor | None = None,
    ) -> Tensor:
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
        return self.decoder.forward(token_ids, rows, self._kv, self._states_of(pieces), residual_TH)

    def _states_of(self, pieces: Sequence[Piece]) -> StepStates:
        if not self._states.shape[1]:
            return NO_STATES
        rows = [
            StateRow(piece.end - piece.start, piece.sequence, piece.sequence if piece.start else -1) for piece in pieces
        ]
        return StepStates(self._states, rows)

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


def random_sequences(vocab: int, lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Token ids, the first and the last of the vocabulary among them."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    sequences[0][0], sequences[-1][-1] = 0, vocab - 1
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
