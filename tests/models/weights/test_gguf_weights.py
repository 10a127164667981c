from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from eventlm.errors import CheckpointError
from eventlm.models.config import read_model
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.weights.find_weights import find_weights
from tests.models.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))


def test_weights_that_are_not_those_of_the_metadata_are_told(tmp_path: Path) -> None:
    def error_of(change: Any) -> str:
        path = tmp_path / "changed.gguf"
        change_tensors(tmp_path / "tiny.gguf", path, change)
        with pytest.raises(CheckpointError) as caught:
            find_all(path)
        return str(caught.value).removeprefix(f"{path}: ")

    write_gguf(tmp_path / "tiny.gguf")
    assert error_of(lambda tensors: tensors.pop("blk.1.ffn_up.weight")) == (
        "tensor blk.1.ffn_up.weight is missing; download the model again"
    )
    assert "is missing (2 are); download" in error_of(
        lambda tensors: (tensors.pop("blk.0.ffn_up.weight"), tensors.pop("output_norm.weight"))
    )
    assert error_of(lambda tensors: tensors.update({"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})) == (
        "tensor blk.0.attn_sinks.weight is not one of LlamaForCausalLM as the metadata describe it; such models are "
        "not supported"
    )
    assert error_of(lambda tensors: tensors.update({"blk.0.ffn_norm.weight": np.zeros(32, np.float32)})) == (
        "tensor blk.0.ffn_norm.weight has shape [32], by the metadata it is [64]; download the file again"
    )
    assert "tensor token_embd.weight is missing" in error_of(lambda tensors: tensors.pop("token_embd.weight"))
    blocks = gguf.quantize(np.zeros(64, np.float32), GGMLQuantizationType.Q8_0)
    assert error_of(lambda tensors: tensors.update({"output_norm.weight": blocks})).startswith(
        "tensor output_norm.weight is a vector of type Q8_0, and vectors must be"
    )


def find_all(path: Path) -> None:
    folder = gguf_folder(path)
    find_weights(folder, read_model(folder))


def change_tensors(source: Path, target: Path, change: Any, architecture: str = "llama") -> None:
    """A copy with other tensors."""
    reader = gguf.GGUFReader(source)
    writer = GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(key, field.contents(), kinds[0], kinds[1])
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    change(tensors)
    for name, data in tensors.items():
        kind = types.get(name, GGMLQuantizationType.F32)
        writer.add_tensor(
            name, data, raw_dtype=GGMLQuantizationType.Q8_0 if data.dtype == np.uint8 and data.ndim == 1 else kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
