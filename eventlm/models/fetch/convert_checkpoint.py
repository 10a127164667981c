"""Write the checkpoint of a folder as one safetensors file in bfloat16: `convert_checkpoint FOLDER TARGET`.

Runs as a child process, because it loads torch and transformers and its caller must not. What it writes is for programs
that cannot read GGUF files.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from eventlm.models.checkpoint.json_files import read_json_object
from eventlm.models.checkpoint.safetensors_header import SINGLE_FILE
from eventlm.models.config import read_model
from eventlm.models.program import WeightKey
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.tensor_names import checkpoint_tensors
from eventlm.models.weights.weight_reader import read_pieces

#: Files that are the same for both. A checkpoint has some of them.
_COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def convert(folder: Path, target: Path) -> None:
    """Fill `target`, which is empty. The model has no experts. Raises CheckpointError."""
    model = read_model(folder)
    shapes = model_weights(model)
    tensors: dict[str, torch.Tensor] = {}
    weights: dict[WeightKey, torch.Tensor] = {}
    for name, keys in checkpoint_tensors(model).items():
        nums_rows = [shapes[key][0] for key in keys]
        tensors[name] = torch.empty(sum(nums_rows), *shapes[keys[0]][1:], dtype=torch.bfloat16)
        weights |= dict(zip(keys, tensors[name].split(nums_rows), strict=True))
    for key, first_row, values in read_pieces(find_weights(folder, model)):
        weights[key][first_row : first_row + len(values)] = values
    save_file(tensors, target / SINGLE_FILE, metadata={"format": "pt"})
    # With the names that transformers looks for, and what it takes for granted.
    config = getattr(transformers, model.architecture).config_class(**read_json_object(folder / "config.json"))
    config.dtype = "bfloat16"
    config.save_pretrained(target)
    for name in _COPIED:
        if (folder / name).exists():
            shutil.copyfile(folder / name, target / name)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
