"""Write a model's twin whose weights lie on no grid: `python -m benchmarks.rotated_checkpoint FOLDER TARGET`.

The default model's weights in bfloat16 were made of 4-bit codes, so that rounding them to 4 bits shows nothing. The
twin computes the same: weights of norms are multiplied into the matrices behind them, and the residual stream is
rotated by a random orthogonal matrix, which norms of root mean squares do not notice. It is a Llama in bfloat16 with a
head of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_READ = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
_WRITTEN = {"self_attn": "o_proj", "mlp": "down_proj"}
_NORMS = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}


def rotated(tensors: dict[str, Tensor], num_layers: int, *, seed: int = 0) -> dict[str, Tensor]:
    """The weights of the twin, float32, by the names that transformers has for a Llama's."""
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    embedding = tensors["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    rotation_HH = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(seed)))[0]
    head = tensors.get("lm_head.weight", embedding) * tensors["model.norm.weight"]
    ones = torch.ones(hidden)
    found = {
        "model.embed_tokens.weight": embedding @ rotation_HH,
        "lm_head.weight": head @ rotation_HH,
        "model.norm.weight": ones,
    }
    for number in range(num_layers):
        layer = f"model.layers.{number}"
        for part, norm in _NORMS.items():
            found[f"{layer}.{norm}.weight"] = ones.clone()
            for name in _READ[part]:
                matrix = f"{layer}.{part}.{name}.weight"
                found[matrix] = tensors[matrix] * tensors[f"{layer}.{norm}.weight"] @ rotation_HH
            matrix = f"{layer}.{part}.{_WRITTEN[part]}.weight"
            found[matrix] = rotation_HH.T @ tensors[matrix]
    return found


def save_rotated(folder: Path, target: Path) -> None:
    """Of a Llama without biases whose weights are in one safetensors file, with its tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    tensors = rotated(load_file(folder / "model.safetensors"), config["num_hidden_layers"])
    target.mkdir(parents=True)
    save_file(
        {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(folder / name, target / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    save_rotated(given.folder, given.target)
