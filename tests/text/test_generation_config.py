"""Defaults from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.sampling_params import SamplingParams
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.generation_config import load_generation_defaults

TOKENIZER = FakeTokenizer()  # ends at 257


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, SamplingParams(eos_token_ids=(257,))),
        (
            {"generation_config.json": {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [5, 257]}},
            SamplingParams(temperature=0.6, top_p=0.9, top_k=20, eos_token_ids=(5, 257)),
        ),
        (
            {"generation_config.json": {"repetition_penalty": 1.05, "min_p": 0.1}},
            SamplingParams(repetition_penalty=1.05, min_p=0.1, eos_token_ids=(257,)),
        ),
        (
            {"generation_config.json": {"temperature": None, "eos_token_id": 7}, "config.json": {"eos_token_id": 8}},
            SamplingParams(eos_token_ids=(7, 257)),
        ),
        ({"config.json": {"eos_token_id": 8}}, SamplingParams(eos_token_ids=(8, 257))),
    ],
)
def test_defaults(tmp_path: Path, files: dict[str, Any], expected: SamplingParams) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_generation_defaults(tmp_path, TOKENIZER) == expected


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", '{"top_k": "many"}', "top_k: Expected `int | null`, got `str`"),
        ("generation_config.json", '{"min_p": 2}', "min_p: Expected `float` <= 1.0"),
        (
            "generation_config.json",
            '{"temperature": -1}',
            "temperature: Expected `float` >= 0.0",
        ),
        ("generation_config.json", '{"top_p": 0}', "top_p: Expected `float` > 0.0"),
        ("generation_config.json", '{"repetition_penalty": 0}', "repetition_penalty: Expected `float` >= "),
        ("generation_config.json", "[1]", "not a JSON object: "),
        ("generation_config.json", '{"top_k":', "not a JSON object: "),
        (
            "config.json",
            '{"eos_token_id": "end"}',
            "eos_token_id: Expected `int | array | null`, got `str`",
        ),
    ],
)
def test_an_error_in_a_file_is_reported(tmp_path: Path, file: str, content: str, message: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError) as error:
        load_generation_defaults(tmp_path, TOKENIZER)
    assert f"{tmp_path / file}: {message}" in str(error.value)
