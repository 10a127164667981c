"""The checkpoints of the benchmark beside peers, in the form that each server reads.

One checkpoint in Hugging Face's form is what all are made of: the default model in bfloat16, or random weights of the
shape of Qwen3-0.6B with the default model's tokenizer, its vocabulary filled up with words that no text has. The peers'
own tools convert it: optimum-intel to OpenVINO's form, llama.cpp's script to GGUF and llama.cpp's quantiser to the
types of fewer bits. The default model's Q4_1 is the file that its authors published.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.peer.setup import Peers, run_step
from benchmarks.random_qwen import VOCAB_SIZE, save_random_qwen

ModelName = Literal["qwen3-0.6b", "smollm2"]
Precision = Literal["bf16", "int8", "int4", "q4_k_m", "q4_0", "q4_1", "q8_0"]

#: OpenVINO's 16-bit form is float16; with bf16 as its inference precision it computes in bf16 all the same. Its int8
#: and int4 are of the weights, the embedding in int8 with both; activations are quantised as it runs.
OPENVINO_FORMATS: dict[Precision, Sequence[str]] = {
    "bf16": ["fp16"],
    "int8": ["int8"],
    # Groups of 128, its default, or of fewer where rows are no multiple of it.
    "int4": ["int4", "--group-size-fallback", "adjust"],
}
#: llama.cpp's nearest to each. Of those after the first two eventlm serves the same file.
GGUF_TYPES: dict[Precision, str] = {
    "bf16": "bf16",
    "int8": "q8_0",
    "q4_k_m": "q4_k_m",
    "q4_0": "q4_0",
    "q4_1": "q4_1",
    "q8_0": "q8_0",
}
GGUF_PRECISIONS: tuple[Precision, ...] = ("q4_k_m", "q4_0", "q4_1", "q8_0")
CONVERT_SECONDS = 1800.0


def checkpoint(name: ModelName, peers: Peers) -> Path:
    """The folder of a checkpoint in Hugging Face's form. It is made, or fetched, where it is not there yet."""
    from eventlm.models.fetch.pull import pull

    default = pull("smollm2:bf16")
    if name == "smollm2":
        return default
    folder = peers.folder / "models" / name / "hf"
    if not folder.exists():
        print(f"make random weights of {name}'s shape in {folder}", file=sys.stderr, flush=True)
        partial = _fresh(folder)
        save_random_qwen(partial)
        _pad_tokenizer(default, partial, VOCAB_SIZE)
        partial.rename(folder)
    return folder


def openvino_model(name: ModelName, precision: Precision, source: Path, peers: Peers) -> Path:
    """The folder of its OpenVINO form. Raises SetupError."""
    folder = peers.folder / "models" / name / f"openvino-{precision}"
    if not folder.exists():
        partial = _fresh(folder)
        weights = ["--weight-format", *OPENVINO_FORMATS[precision]]
        task = ["--task", "text-generation-with-past"]
        run_step(
            f"convert {name} to OpenVINO's form, {precision}",
            [peers.python.with_name("optimum-cli"), "export", "openvino", "-m", source, *task, *weights, partial],
            folder.with_suffix(".log"),
            timeout_s=CONVERT_SECONDS,
            HF_HUB_OFFLINE="1",
        )
        partial.rename(folder)
    return folder


def gguf_model(name: ModelName, precision: Precision, source: Path, peers: Peers) -> Path:
    """Its GGUF file. Raises SetupError."""
    kind = GGUF_TYPES[precision]
    file = peers.folder / "models" / name / f"{kind}.gguf"
    if file.exists():
        return file
    partial = file.with_suffix(".partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    if (name, kind) == ("smollm2", "q4_1"):
        from eventlm.models.fetch.pull import pull

        (published,) = pull("smollm2").glob("*.gguf")
        return published
    if kind == "bf16":
        script = peers.llama_source / "convert_hf_to_gguf.py"
        convert: list[str | Path] = [peers.python, script, source, "--outtype", kind, "--outfile", partial]
        _convert(f"convert {name} to GGUF", convert, file)
    else:
        whole = gguf_model(name, "bf16", source, peers)
        _convert(f"quantise {name}, {kind}", [peers.llama_program("llama-quantize"), whole, partial, kind], file)
    partial.rename(file)
    return file


def _convert(what: str, command: Sequence[str | Path], file: Path) -> None:
    run_step(what, command, file.with_suffix(".log"), timeout_s=CONVERT_SECONDS, HF_HUB_OFFLINE="1")


def _fresh(folder: Path) -> Path:
    """An empty folder to fill, of which `folder` is made when it is whole."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _pad_tokenizer(source: Path, folder: Path, vocab_size: int) -> None:
    """Copy a byte-level BPE tokenizer with words added that no merge leads to: texts become the same tokens as before,
    and each token of the larger vocabulary becomes a text.
    """
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"Ġpad{token}": token for token in range(len(vocabulary), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(source / "tokenizer_config.json", folder)
