"""Tiny checkpoints with random weights and a real tokenizer, made when a test needs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, PAD_ID, IM_START_ID, IM_END_ID = range(5)
#: All bytes, the special tokens and the merges.
VOCAB_SIZE = 384

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France?",
    "You are a helpful assistant. user assistant system: please answer in one sentence, then stop.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of fools.",
    "In the beginning there was one log, and the log was ordered; every step of every request was an event on it.",
)

Rope = Literal["default", "linear", "llama3"]


def make_checkpoint(
    folder: Path,
    *,
    family: Literal["llama", "qwen3"] = "llama",
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    num_layers: int = 2,
    tied: bool = False,
    bias: bool = False,
    rope: Rope = "default",
    old_rope_spelling: bool = False,
    dtype: str = "float32",
    max_position_embeddings: int = 512,
    max_shard_size: str = "1GB",
    seed: int = 0,
) -> Path:
    """An ordinary Hugging Face folder: config, generation config, safetensors, tokenizer with a chat template.

    Norms and biases are random too. `old_rope_spelling` writes what transformers 4 wrote. Returns `folder`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    families: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = families[family]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        attention_bias=bias,
        rope_parameters=_rope_parameters(rope),
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    weight.normal_(std=0.5)
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if old_rope_spelling:
        _write_old_rope(folder / "config.json", rope)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, a byte-level BPE, and tokenizer_config.json with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object in a file; None removes a key."""
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0}
    if rope == "linear":
        parameters["factor"] = 4.0
    elif rope == "llama3":
        parameters |= {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    return parameters


def _write_old_rope(path: Path, rope: Rope) -> None:
    scaling = _rope_parameters(rope)
    theta = scaling.pop("rope_theta")
    if rope == "linear":
        scaling["type"] = scaling.pop("rope_type")
    edit_json(path, rope_parameters=None, rope_theta=theta, rope_scaling=None if rope == "default" else scaling)
