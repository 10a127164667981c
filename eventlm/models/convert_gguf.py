"""Convert a GGUF file to an ordinary Hugging Face checkpoint folder: `convert_gguf.py MODEL.gguf FOLDER`.

Runs as a child process of its own, by path, because it loads torch and transformers and its caller must not.
It imports nothing of eventlm. Each line on its standard output is a phase that begins.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, bfloat16 weights, tokenizer, chat template and generation config to `folder`.

    Raises what transformers raises for a file that it cannot read or an architecture that it does not know.
    """
    begin("reading the weights")
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16, **dequantize_option()
    )
    # GGUF keeps it as a float32; as a Python float that reads 9.999999747378752e-06 where 1e-05 was meant.
    model.config.rms_norm_eps = float(str(np.float32(model.config.rms_norm_eps)))
    # The GGUF's title, which transformers files under a key of no meaning.
    vars(model.config).pop("_model_name_or_path", None)

    begin("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    set_pre_tokenizer(tokenizer, str(read_field(gguf_file, "tokenizer.ggml.pre")))
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


def set_pre_tokenizer(tokenizer: Any, name: str) -> None:
    """Split text before BPE as the vocabulary was trained, where transformers does not do so by itself.

    It takes an unknown `tokenizer.ggml.pre` for GPT-2's split. SmolLM's also cuts numbers into single digits;
    with GPT-2's, numbers would become tokens that the model has hardly seen.
    """
    if name == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def read_field(gguf_file: Path, name: str) -> Any:
    """One metadata value of the file, None if it has no such key."""
    field = GGUFReader(gguf_file).get_field(name)
    return None if field is None else field.contents()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
