from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.json_files import convert_object, read_json_object


class Shape(msgspec.Struct):
    layers: Annotated[int, msgspec.Meta(ge=1)]
    theta: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    ends: int | list[int] | None = None
    tied: bool = False
    names: list[str] = []
    rope: dict[str, float] = {}


def read(folder: Path, content: bytes) -> dict[str, object]:
    (folder / "config.json").write_bytes(content)
    return read_json_object(folder / "config.json")


def test_an_object_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, b'{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]", "not a JSON object: Expected `object`, got `array`"),
        (b'"x"', "not a JSON object: Expected `object`, got `str`"),
        (b"{", "not a JSON object: "),
        (b'{"a": "\xff"}', "not a JSON object: "),
        (b"[" * 100_000, "not a JSON object: "),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git-LFS pointer"),
    ],
)
def test_what_is_no_object(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert words in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=": no such file"):
        read_json_object(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_json_object(tmp_path)


def test_fields_are_taken_and_others_left() -> None:
    shape = convert_object({"layers": 2, "ends": [1, 2], "other": 5}, Shape, Path("c.json"))
    assert (shape.layers, shape.ends, shape.theta) == (2, [1, 2], 1.0)


@pytest.mark.parametrize(
    ("values", "inside", "problem"),
    [
        ({}, "", "Object missing required field `layers`"),
        ({}, "text_config", "text_config: Object missing required field `layers`"),
        ({"layers": 0}, "", "layers: Expected `int` >= 1"),
        ({"layers": 1, "theta": 0}, "", "theta: Expected `float` > 0.0"),
        ({"layers": 1, "share": 2}, "rope", "rope.share: Expected `float` <= 1.0"),
        ({"layers": 1, "ends": "x"}, "", "ends: Expected `int | array | null`, got `str`"),
        ({"layers": 1, "tied": 1}, "", "tied: Expected `bool`, got `int`"),
        ({"layers": 1, "names": [1]}, "", "names[0]: Expected `str`, got `int`"),
        ({"layers": 1, "rope": []}, "", "rope: Expected `object`, got `array`"),
    ],
)
def test_a_field_that_is_wrong_is_named_with_what_it_must_be(
    values: dict[str, object], inside: str, problem: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert_object(values, Shape, Path("c.json"), inside=inside)
    assert str(caught.value) == f"c.json: {problem}"
