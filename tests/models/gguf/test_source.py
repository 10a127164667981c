"""What a folder that was made of a GGUF file says of its weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.gguf.source import SOURCE_FILE, GgufSource, read_source


def test_other_folders_have_none(tmp_path: Path) -> None:
    assert read_source(tmp_path) is None
    assert read_source(tmp_path / "nowhere") is None
    (tmp_path / "file").touch()
    assert read_source(tmp_path / "file") is None


def test_a_damaged_one_is_told(tmp_path: Path) -> None:
    (tmp_path / SOURCE_FILE).write_text('{"architecture": 3}')
    with pytest.raises(CheckpointError, match=r"gguf\.json: .*; remove its folder, which is made again"):
        read_source(tmp_path)


def test_tensors_have_the_names_of_llama_cpp() -> None:
    names = ["model.embed_tokens.weight", "model.layers.3.post_attention_layernorm.weight", "lm_head.weight", "other"]
    llama, gemma = (GgufSource(each, "", []) for each in ("llama", "gemma2"))
    assert list(llama.tensor_names(names, 4).values()) == [
        *("token_embd.weight", "blk.3.ffn_norm.weight", "output.weight", "other")
    ]
    assert gemma.tensor_names(names, 4)[names[1]] == "blk.3.post_attention_norm.weight"
    assert llama.is_interleaved
    assert not gemma.is_interleaved


def test_nothing_else_costs_what_gguf_files_cost() -> None:
    program = (
        "import sys, eventlm.models.weights.find_weights, eventlm.bootstrap.model_source; print('gguf' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
