"""Small tokenizer folders, trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    f"The quick brown fox number {number} jumps; naïve café größer 日本語 🙂 привет, x={number}!\n\n"
    for number in range(200)
]


def byte_level(folder: Path, **config: Any) -> Path:
    """A GPT-2 / Llama 3 / Qwen like tokenizer that puts <s> before a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("two words", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(8)
    return _write(folder, backend, {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, **config})


def byte_fallback(folder: Path, **config: Any) -> Path:
    """A Llama 2 like tokenizer: ▁ for spaces, <0xAB> for bytes that no token has."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator([text.split("日")[0] for text in CORPUS], trainer)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    data = json.loads(backend.to_str())
    # The bytes are ordinary tokens of such a vocabulary, not special ones.
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    backend = Tokenizer.from_str(json.dumps(data))
    return _write(folder, backend, {"bos_token": "<s>", "eos_token": "</s>", **config})


def _write(folder: Path, backend: Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
