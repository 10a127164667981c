"""A checkpoint of the shape of Qwen3-0.6B with random weights, the same each time."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 151_936


def save_random_qwen(folder: Path) -> None:
    """Its config.json and weights, in bf16; no tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
