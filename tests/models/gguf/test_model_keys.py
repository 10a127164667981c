from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from eventlm.errors import CheckpointError
from eventlm.models.gguf.header import read_header
from eventlm.models.gguf.model_keys import ModelKeys
from tests.models.gguf.files import add_keys, finish


@pytest.fixture
def keys(tmp_path: Path) -> ModelKeys:
    writer = GGUFWriter(tmp_path / "model.gguf", "gemma4")
    add_keys(
        writer, {"gemma4.three": 3, "gemma4.none": 0, "gemma4.minus": -1, "gemma4.array": [1, 2], "other.three": 4}
    )
    finish(writer)
    return ModelKeys(read_header(tmp_path / "model.gguf"))


def test_names_begin_with_the_architecture(keys: ModelKeys) -> None:
    assert keys.architecture == "gemma4"
    assert keys.name("{arch}.three") == "gemma4.three"
    assert (keys.raw("{arch}.array"), keys.raw("{arch}.missing")) == ([1, 2], None)
    assert (keys.get("{arch}.three", int), keys.get("{arch}.missing", int, 5)) == (3, 5)
    assert [keys.count(f"{{arch}}.{name}", 3) for name in ("three", "none", "missing")] == [3, 0, 0]
    assert (keys.need("{arch}.none", int), keys.size("{arch}.three")) == (0, 3)


def test_what_is_refused_is_named(keys: ModelKeys) -> None:
    def message(do: object, *arguments: object) -> str:
        with pytest.raises(CheckpointError) as caught:
            do(*arguments)  # type: ignore[operator]
        return str(caught.value).removeprefix(f"{keys.path}: ")

    assert message(keys.refuse, "{arch}.three", "is odd") == ("key gemma4.three is odd; take another file of the model")
    assert message(keys.size, "{arch}.none") == (
        "key gemma4.none is 0, it must be a positive integer; take another file of the model"
    )
    assert message(keys.count, "{arch}.three", 2) == (
        "key gemma4.three is 3, it must be from 0 to 2; take another file of the model"
    )
    assert message(keys.count, "{arch}.minus", 2).startswith("key gemma4.minus is -1, it must be from 0 to 2;")
    assert message(keys.size, "{arch}.missing").startswith("key gemma4.missing is missing")
    assert message(keys.get, "{arch}.array", int) == (
        "key gemma4.array is an array, it must be an integer; take another file"
    )
