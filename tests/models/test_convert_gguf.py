from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eventlm.errors import PullError
from eventlm.models.pull import convert_in_child
from tests.models import tiny_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    root = tmp_path_factory.mktemp("convert")
    weights = tiny_gguf.write_gguf(root / "model.gguf")
    (root / "checkpoint").mkdir()
    convert_in_child(root / "model.gguf", root / "checkpoint")
    return root / "checkpoint", weights


def test_logits_are_those_of_the_dequantized_weights(converted):
    folder, weights = converted
    config = LlamaConfig(
        vocab_size=len(tiny_gguf.TOKENS),
        hidden_size=tiny_gguf.HIDDEN,
        intermediate_size=tiny_gguf.INTERMEDIATE,
        num_hidden_layers=tiny_gguf.NUM_LAYERS,
        num_attention_heads=tiny_gguf.NUM_HEADS,
        num_key_value_heads=tiny_gguf.NUM_KV_HEADS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": tiny_gguf.ROPE_THETA},
    )
    expected = LlamaForCausalLM(config)
    state = {name: torch.from_numpy(values).bfloat16().float() for name, values in weights.items()}
    missing, unexpected = expected.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    actual = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = torch.arange(0, len(tiny_gguf.TOKENS), 7)[None]
    with torch.no_grad():
        torch.testing.assert_close(actual(token_ids).logits, expected(token_ids).logits, rtol=0, atol=1e-5)


def test_config_survives(converted):
    config = json.loads((converted[0] / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 100_000.0, "rope_type": "default"}
    assert config["max_position_embeddings"] == tiny_gguf.CONTEXT_TOKENS
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
    assert config["dtype"] == "bfloat16"
    assert config["head_dim"] == tiny_gguf.HEAD_DIM
    assert "quantization_config" not in config
    assert "_model_name_or_path" not in config
    generation = json.loads((converted[0] / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.tokenize("hello 12 <|im_end|>") == ["hello", "Ġ", "1", "2", "Ġ", "<|im_end|>"]
    assert [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    ]
    assert tokenizer.model_max_length == tiny_gguf.CONTEXT_TOKENS
    text = "Grüße, 世界\n\tx  12"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_survives(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_split_that_is_not_known_is_refused(tmp_path):
    tiny_gguf.write_gguf(tmp_path / "model.gguf", split="other")
    with pytest.raises(PullError, match=r"model\.gguf failed: ValueError: .* split 'other' is not supported"):
        convert_in_child(tmp_path / "model.gguf", tmp_path / "checkpoint")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"no magic number" * 100)
    with pytest.raises(PullError, match=r"converting model\.gguf failed: .*GGUF magic"):
        convert_in_child(tmp_path / "model.gguf", tmp_path / "checkpoint")
