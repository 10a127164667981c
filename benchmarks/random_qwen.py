"""Checkpoints of the shapes of Qwen3 models with random weights, the same each time on the same device."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

VOCAB_SIZE = 151_936


class Shape(NamedTuple):
    """Of a Qwen3 model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = VOCAB_SIZE
    tied: bool = False


QWEN3_0_6B = Shape(hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tied=True)
QWEN3_8B = Shape(hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32)


def save_random_qwen(folder: Path, shape: Shape = QWEN3_0_6B, *, device: str = "cpu") -> None:
    """Its config.json and weights, in bf16; no tokenizer. Weights are drawn on `device`, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
