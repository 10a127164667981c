"""Convert a GGUF file to an ordinary Hugging Face checkpoint folder: `convert_gguf.py MODEL.gguf FOLDER`.

Runs as a child process of its own, by path, because it loads torch and transformers and its caller must not.
It imports nothing of eventlm. Each line on its standard output is a phase that begins.

transformers reads config and weights. The tokenizer is built here from the file's metadata: transformers
silently takes an unknown `tokenizer.ggml.pre` for GPT-2's split, and some releases lose special tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

#: How text is split before BPE, by `tokenizer.ggml.pre`. SmolLM's cuts numbers into single digits.
PRE_TOKENIZERS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, bfloat16 weights, tokenizer, chat template and generation config to `folder`.

    Raises ValueError for a tokenizer that is not supported, and what transformers raises for a file that it
    cannot read or an architecture that it does not know.
    """
    begin("reading the tokenizer")
    tokenizer = read_tokenizer(gguf_file)
    begin("reading the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16, **dequantize_option()
    )
    # GGUF keeps it as a float32; as a Python float that reads 9.999999747378752e-06 where 1e-05 was meant.
    model.config.rms_norm_eps = float(str(np.float32(model.config.rms_norm_eps)))
    # The GGUF's title, which transformers files under a key of no meaning.
    vars(model.config).pop("_model_name_or_path", None)
    tokenizer.model_max_length = model.config.max_position_embeddings

    begin("writing the checkpoint")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def begin(phase: str) -> None:
    print(phase, flush=True)


def dequantize_option() -> dict[str, Any]:
    """Ask for dense weights, where transformers would otherwise keep GGUF blocks.

    Releases without `GgufConfig` always make them dense.
    """
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def read_tokenizer(gguf_file: Path) -> transformers.PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that the metadata describes, with special tokens and chat template."""
    reader = GGUFReader(gguf_file)

    def read(key: str) -> Any:
        field = reader.get_field(f"tokenizer.{key}")
        return None if field is None else field.contents()

    kind, split = read("ggml.model"), read("ggml.pre")
    if kind != "gpt2" or split not in PRE_TOKENIZERS:
        raise ValueError(f"the tokenizer {kind!r} with the split {split!r} is not supported")
    if read("ggml.add_bos_token"):
        raise ValueError("a tokenizer that puts a token before every text is not supported")
    tokens = read("ggml.tokens")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=build_bpe(tokens, read("ggml.merges"), read("ggml.token_type"), split),
        chat_template=read("chat_template"),
        clean_up_tokenization_spaces=False,
        **{
            f"{name}_token": tokens[index]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (index := read(f"ggml.{key}_token_id")) is not None
        },
    )


def build_bpe(tokens: list[str], merges: list[str], types: list[int], split: str) -> Tokenizer:
    """A byte-level BPE over `tokens` (by id) and `merges` ("left right", by rank), split as `split` says."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[split])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return tokenizer


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
