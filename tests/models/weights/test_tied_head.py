"""Whether a checkpoint's output matrix is another than its embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eventlm.models.spec import TensorNames
from eventlm.models.weights.tied_head import has_own_head

EMBEDDING = torch.arange(24_000, dtype=torch.float32).reshape(1000, 24)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (EMBEDDING.clone(), False),
        (EMBEDDING + 1, True),
        (EMBEDDING.to(torch.bfloat16), True),
        (EMBEDDING[:500].clone(), True),
        (None, False),
    ],
)
def test_a_head_is_its_own_if_it_differs(tmp_path: Path, head: torch.Tensor | None, expected: bool) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING}
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file(tensors, tmp_path / "model.safetensors")
    assert has_own_head(tmp_path, TensorNames()) is expected


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert has_own_head(tmp_path, TensorNames()) is False


def test_a_quantized_head_is_its_own(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.qweight": torch.zeros(3, 1000, dtype=torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert has_own_head(tmp_path, TensorNames())
