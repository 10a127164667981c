"""Small random models of every decoder that transformers makes, and who can compute them: docs/decoders.json.

    python -m tests.models.decoders [MODEL_TYPE ...]

writes that file, or with names those entries of it; a table in docs/models.md is made of it. It takes some minutes.
For each kind of model that is not refused it compares a worker's logits and tokens with transformers'.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.native import unsupported
from eventlm.models.checkpoint.json_files import read_json_object
from eventlm.models.config import model_of
from eventlm.models.cpu_kernels import native_model
from eventlm.models.transformers_probe import probe_model
from tests.models.families.proof import LENGTHS, VOCAB_SIZE, serve
from tests.worker.reference import Key, Schedule

FILE = Path(__file__).parents[2] / "docs" / "decoders.json"
NUM_TOKENS = 64
#: Of logits in float32, as a share of the largest.
TOLERANCE = 1e-4
#: What models have of these fields.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    **dict.fromkeys(
        ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    "moe_shared_expert_intermediate_size": 48,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_head"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("num_local_experts", "num_experts", "moe_num_experts"), 6),
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 9,
    "rotary_dim": 8,
    "is_decoder": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
#: Those that a model has only if its own config has them.
OPTIONAL = ("sliding_window", "head_dim", "q_lora_rank")
KINDS = ["full_attention", "sliding_attention"] * 2
#: What some kinds need besides.
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("deepseek_v3", "sarvam_mla", "minicpm3", "glm4_moe_lite", "youtu", "axk1", "longcat_flash"), LATENT
    ),
    "deepseek_v2": LATENT | {"topk_method": "greedy"},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron")},
    "ministral": {"head_dim": 16, "sliding_window": 9},
    **{
        name: {"global_head_dim": 32, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB_SIZE}
        for name in ("gemma4", "gemma4_text")
    },
    **{name: {"global_head_dim": 32} for name in ("gemma4_unified", "gemma4_unified_text")},
    "dots1": {"head_dim": 16, "sliding_window": 9, "layer_types": KINDS, "n_shared_experts": 1},
    "cohere_compass_text": {
        "head_dim": 16,
        "layer_types": KINDS,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in KINDS},
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": KINDS,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
}
#: Kinds whose own defaults are no config, and the least that makes one.
LEAST: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}


def write_config(folder: Path, model_type: str, **fields: Any) -> Any:
    """Write a small config of this kind, and return it."""
    config = _config(model_type, **fields)
    config.architectures = [_architecture(model_type)]
    config.save_pretrained(folder)
    return config


def write_checkpoint(folder: Path, model_type: str, **fields: Any) -> Any:
    """Write a small checkpoint of this kind, and return transformers' model of it, in float32."""
    import transformers

    config = write_config(folder, model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class: Any = getattr(transformers, config.architectures[0])
        model = model_class._from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("bias") or "sink" in name:
                    weight.normal_(std=0.3)
                elif "norm" in name or ".ln_" in name:
                    weight.add_(torch.empty_like(weight).uniform_(-0.5, 0.5))
                weight.copy_(weight.bfloat16())
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def compare(folder: Path, exact: Any, patch: pytest.MonkeyPatch, num_tokens: int = NUM_TOKENS) -> Schedule:
    """Serve `folder` by transformers' forward pass in float32; logits and tokens are those of `exact`.

    Prompts come whole and in chunks, while others decode. Greedy tokens that are the largest of the exact logits, each
    after the ones before, are what `generate` gives.
    """
    rng = random.Random(3)
    prompts: dict[Key, list[int]] = {
        (number, 0): [rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for number, length in enumerate(LENGTHS)
    }
    schedule = serve(folder, prompts, patch, num_tokens, dtype="float32", model_impl="transformers")
    for key, prompt in prompts.items():
        output = schedule.outputs[key]
        with torch.inference_mode():
            expected = exact(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert output == expected.argmax(dim=-1).tolist(), f"tokens of {key}"
        difference = float((torch.stack(schedule.logits[key]) - expected).abs().max() / expected.abs().max())
        assert difference < TOLERANCE, f"logits of {key}: {difference}"
    return schedule


def _architecture(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _config(model_type: str, **fields: Any) -> Any:
    """Fields are the decoder's."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    least = LEAST.get(model_type, {})
    base = config_class(**least)
    text = base.get_text_config(decoder=True)
    name = next((name for name, value in vars(base).items() if value is text), "")
    own = _sizes_of(text if name else base) | SPECIAL.get(model_type, {}) | {"eos_token_id": None} | fields
    if name:
        return config_class(**{name: own | least.get(name, {})})
    parts = {name: _sizes_of(part) for name, part in vars(base).items() if hasattr(part, "to_dict")}
    return config_class(**parts | own)


def _sizes_of(config: Any) -> dict[str, Any]:
    known, aliases = config.to_dict(), getattr(config, "attribute_map", {})
    own = {name for name in OPTIONAL if known.get(aliases.get(name, name)) is not None}
    found = {
        name: value
        for name, value in SIZES.items()
        if (name in known or name in aliases) and (name not in OPTIONAL or name in own)
    }
    return {name: value for name, value in found.items() if aliases.get(name) not in found}


def _paths(model_type: str, folder: Path) -> dict[str, str]:
    """For each path, why it cannot compute this kind of model; empty if it can."""
    from transformers import CONFIG_MAPPING

    try:
        write_config(folder, model_type)
        is_small = True
    except Exception:
        # Fields that must fit together in a way that nothing here knows; that it is refused may be seen all the same.
        config = CONFIG_MAPPING[model_type](architectures=[_architecture(model_type)], **LEAST.get(model_type, {}))
        config.save_pretrained(folder)
        is_small = False
    path = folder / "config.json"
    found = {"torch": "", "compiled": "", "transformers": ""}
    try:
        model = model_of(read_json_object(path), path)
        found["compiled"] = unsupported(native_model(model), 16)
    except CheckpointError as error:
        found["torch"] = found["compiled"] = str(error).removeprefix(f"{path}: ")
    try:
        probe_model(folder)
    except CheckpointError as error:
        found["transformers"] = str(error).partition(" here: ")[2]
        return found
    exact = None
    if is_small:
        # Some kinds cannot be made, or are saved as another kind.
        with contextlib.suppress(AttributeError):
            exact = write_checkpoint(folder, model_type)
    if exact is None or read_json_object(path)["model_type"] != model_type:
        found["transformers"] = "not compared: no small model of it is made"
        return found
    with pytest.MonkeyPatch.context() as patch:
        compare(folder, exact, patch)
    return found


def main() -> int:
    """Entry point; exit code 1 if a model that is not refused is not computed as transformers does."""
    import transformers

    parser = argparse.ArgumentParser(prog="python -m tests.models.decoders", description=__doc__.split("\n")[0])
    parser.add_argument("model_types", nargs="*")
    given = parser.parse_args().model_types
    transformers.logging.set_verbosity_error()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    table: dict[str, dict[str, str]] = json.loads(FILE.read_text())["models"] if given else {}
    failed = []
    for model_type in given or names:
        folder = Path(tempfile.mkdtemp())
        try:
            table[model_type] = {"architecture": names[model_type], **_paths(model_type, folder)}
        except Exception as error:
            failed.append(model_type)
            print(f"{model_type}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            print(model_type, table[model_type], flush=True)
        finally:
            shutil.rmtree(folder)
    content = {"transformers": transformers.__version__, "models": {name: table[name] for name in sorted(table)}}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
