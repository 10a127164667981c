"""What is written in bfloat16 is what transformers reads, and what its tokenizer reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eventlm.models.fetch.convert_checkpoint import convert
from eventlm.models.fetch.gguf_folder import gguf_folder
from tests.models import tiny_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    root = tmp_path_factory.mktemp("convert")
    weights = tiny_gguf.write_gguf(root / "model.gguf")
    (root / "checkpoint").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENTLM_HOME", str(root / "home"))
        convert(gguf_folder(root / "model.gguf"), root / "checkpoint")
    return root / "checkpoint", weights


def test_logits_are_those_of_the_unpacked_weights(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
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
    assert (actual.generation_config.eos_token_id, actual.config.model_type) == ([2, 0], "llama")


def test_the_tokenizer_and_the_chat_template_survive(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.tokenize("hello 12 <|im_end|>") == ["hello", "Ġ", "1", "2", "Ġ", "<|im_end|>"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
