from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import find_shards
from eventlm.models.transformers_model import check_files, read_in_child
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


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        read_in_child(tmp_path)
