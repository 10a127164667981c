"""Checkpoints with random weights, made when a section needs them and kept for the others of the run."""

from __future__ import annotations

import gc
import itertools
import shutil
from pathlib import Path

import torch

from benchmarks.gpu_harness.row import Context
from benchmarks.random_qwen import QWEN3_0_6B, QWEN3_8B, Shape, save_random_qwen

TINY = Shape(hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32)
SMOKE_VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
SHAPES = {"0.6B": QWEN3_0_6B, "8B": QWEN3_8B}


def qwen(context: Context, size: str) -> Path:
    """The folder of a checkpoint of the shape of a Qwen3 model, and of a tiny one in a smoke run."""
    folder = Path(context.folder) / f"qwen3-{size}"
    if not folder.exists():
        shape = TINY._replace(vocab_size=SMOKE_VOCAB_SIZE) if context.smoke else SHAPES[size]
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_random_qwen(partial, shape, device=context.device)
        make_tokenizer(partial, shape.vocab_size)
        partial.rename(folder)
        # The weights were on the GPU, whose memory is for the engine.
        gc.collect()
        torch.cuda.empty_cache()
    return folder


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE in which every token id has a text, as in a real one: all bytes, then pairs of them, then
    threes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.product(letters, letters))
    threes = (("".join(pair), letter) for pair in pairs for letter in letters)
    words = [*SPECIAL_TOKENS, *letters]
    merges = list(itertools.islice(itertools.chain(pairs, threes), vocab_size - len(words)))
    vocabulary = {word: token for token, word in enumerate([*words, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"}'
    )
