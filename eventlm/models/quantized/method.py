"""How config.json says that a checkpoint is quantized. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.json_files import read_json_object
from eventlm.models.quantized.compressed_tensors import compressed_tensors
from eventlm.models.quantized.floats import fbgemm_fp8, fp8, mxfp4
from eventlm.models.quantized.integers import awq, gptq
from eventlm.models.quantized.scheme import Method

#: By `quant_method`.
METHODS: dict[str, Callable[[dict[str, Any], Path, str], Method]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "mxfp4": mxfp4,
}
#: What GPTQ's tools wrote before config.json had a key for it.
OLD_FILE = "quantize_config.json"
#: Transformers' key, its older one, and that of MLX.
_KEYS = ("quantization_config", "compression_config", "quantization")


def read_method(values: dict[str, Any], path: Path) -> Method | None:
    """What these fields of config.json say; None if nothing is quantized. Errors name the file `path`.

    Raises CheckpointError for a method that is not supported, naming it.
    """
    key = next((key for key in _KEYS if values.get(key)), "")
    if not key:
        return None
    found = values[key] if isinstance(values[key], dict) else {}
    name = found.get("quant_method")
    if key == "quantization" or not isinstance(name, str) or name not in METHODS:
        raise CheckpointError(
            f"{path}: its weights are quantized ({key}: {_described(key, found)}), and of such checkpoints only those "
            f"of {', '.join(METHODS)} can be run; take one of these, or the model in bfloat16 or float16 "
            "(--quantization int8 quantizes it while it loads)"
        )
    return _checked(METHODS[name](found, path, key), path, key)


def read_old_method(folder: Path) -> Method | None:
    """What the file says that old checkpoints of GPTQ have beside config.json; None if there is none.

    Raises CheckpointError like `read_method`.
    """
    path = folder / OLD_FILE
    found = read_json_object(path, required=False)
    if not found:
        return None
    if (name := found.get("quant_method", "gptq")) != "gptq":
        raise CheckpointError(f"{path}: quant_method: {name!r:.80} is not supported there (supported: gptq)")
    return structs.replace(_checked(gptq(found, path, ""), path, "dynamic"), source=OLD_FILE)


def _checked(method: Method, path: Path, key: str) -> Method:
    for rule in method.rules:
        try:
            re.compile(rule.pattern)
        except re.error as error:
            raise CheckpointError(f"{path}: {key}: {rule.pattern} is not a regular expression: {error}") from error
    return method


def _described(key: str, found: dict[str, Any]) -> str:
    name = found.get("quant_method", "an unknown method" if key != "quantization" else "MLX")
    what = found.get("quant_algo") or found.get("bits")
    bits = what or (4 if found.get("load_in_4bit") else 8 if found.get("load_in_8bit") else None)
    if isinstance(bits, int):
        return f"{name} in {bits} bits"
    return f"{name}, {bits}" if isinstance(bits, str) else str(name)
