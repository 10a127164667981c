"""The twin computes the same as the model, and its weights are others."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.rotated_checkpoint import save_rotated
from tests.checkpoints import make_checkpoint


def test_logits_are_the_same(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype="float32", tied=True)
    save_rotated(folder, tmp_path / "twin")
    token_ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        wanted, found = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(token_ids).logits
            for each in (folder, tmp_path / "twin")
        )
    assert (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt() < 0.02
    name = "model.layers.0.mlp.up_proj.weight"
    before, after = (load_file(each / "model.safetensors")[name].float() for each in (folder, tmp_path / "twin"))
    assert (before - after).square().mean() > before.square().mean()
