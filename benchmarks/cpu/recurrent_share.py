"""What share of a decode step do the recurrent operations of a hybrid model take?

    python benchmarks/cpu/recurrent_share.py [--batch 1,8,32] [--context 512]

The model has the shape of Qwen3.5-0.8B (18 of 24 layers have the gated delta rule) and random weights, and is written
to a temporary folder. The table is that of `eventlm bench step`, in which `recurrent` is the convolutions, the delta
rule with the float32 products of beta and decay, and the norm after it; the other products of these layers count as
qkv_proj and o_proj. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path


def save_random_hybrid(folder: Path) -> None:
    """Its config.json and weights, in bf16; no tokenizer."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).bfloat16().save_pretrained(folder)


def main() -> int:
    """Write the checkpoint, and run the command that prints the table; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,8,32", help="sequences that decode together (default: %(default)s)")
    parser.add_argument("--context", default="512", help="tokens that each of them holds (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_random_hybrid(Path(folder))
        command = ["bench", "step", "--model", folder, "--batch", options.batch, "--context", options.context]
        return subprocess.run([sys.executable, "-m", "eventlm", *command, "--prefill", "0"], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
