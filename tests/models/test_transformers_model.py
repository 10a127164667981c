from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import find_shards
from eventlm.models.transformers_model import check_files, in_one_line, read_in_child
from eventlm.models.transformers_probe import probe_model
from tests.checkpoints import edit_json, make_checkpoint


def test_a_child_tells_what_the_model_is_and_why_it_cannot_be_run(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    found = read_in_child(folder)
    assert found == probe_model(folder)
    edit_json(folder / "config.json", model_type="none-such")
    for _ in range(2):
        # The second time it is known.
        with pytest.raises(CheckpointError, match=r"model_type 'none-such' is not known to it$"):
            read_in_child(folder)


def test_files_are_checked_by_their_headers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    check_files(folder)
    (path,) = find_shards(folder)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{path}: .*cut short"):
        check_files(folder)


@pytest.mark.parametrize(
    ("end", "codes"),
    [
        ("weight", torch.ones(4, 4).to(torch.float8_e4m3fn)),
        ("weight", torch.ones(4, 4).char()),
        ("qweight", torch.ones(4, 4).int()),
    ],
)
def test_codes_are_no_weights_of_transformers(end: str, codes: torch.Tensor, tmp_path: Path) -> None:
    """It would take them for numbers. Other integers may be anything."""
    path, name = tmp_path / "model.safetensors", f"model.layers.1.fc1.{end}"
    tensors = {"model.embed.weight": torch.ones(4, 4), "model.embed.position_ids": torch.ones(4).long()}
    save_file(tensors, path)
    check_files(tmp_path)
    save_file(tensors | {name: codes}, path)
    with pytest.raises(CheckpointError, match=f"{path}: tensor {name} has dtype (F8_E4M3|I8|I32), so the weights are"):
        check_files(tmp_path)


def test_an_error_of_several_lines_is_told_in_one() -> None:
    assert in_one_line(ValueError("\none\n  two\n")) == "one two"
    assert in_one_line(ValueError("x" * 5000)) == "x" * 300 + "…"


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        read_in_child(tmp_path)
