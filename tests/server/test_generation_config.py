"""Defaults from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.server.fake_tokenizer import FakeTokenizer
from eventlm.server.generation_config import GenerationDefaults, load_generation_defaults

TOKENIZER = FakeTokenizer()  # ends at 257


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, GenerationDefaults(eos_token_ids=(257,))),
        (
            {"generation_config.json": {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [5, 257]}},
            GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, eos_token_ids=(5, 257)),
        ),
        (
            {"generation_config.json": {"repetition_penalty": 1.05, "min_p": 0.1}},
            GenerationDefaults(repetition_penalty=1.05, min_p=0.1, eos_token_ids=(257,)),
        ),
        (
            {"generation_config.json": {"temperature": None, "eos_token_id": 7}, "config.json": {"eos_token_id": 8}},
            GenerationDefaults(eos_token_ids=(7, 257)),
        ),
        ({"config.json": {"eos_token_id": 8}}, GenerationDefaults(eos_token_ids=(8, 257))),
    ],
)
def test_defaults(tmp_path: Path, files: dict[str, Any], expected: GenerationDefaults) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_generation_defaults(tmp_path, TOKENIZER) == expected


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": "many"}')
    with pytest.raises(CheckpointError, match=r"generation_config.json.*top_k"):
        load_generation_defaults(tmp_path, TOKENIZER)


def test_a_value_out_of_range_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 0}')
    with pytest.raises(CheckpointError, match=r"generation_config.json.*repetition_penalty"):
        load_generation_defaults(tmp_path, TOKENIZER)
