"""A checkpoint has one name on all hosts, wherever each keeps its caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.errors import CheckpointError
from eventlm.launchers.ray.checkpoint import CheckpointName, find_here, name_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """eventlm's cache of this host."""
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder(path: Path) -> Path:
    """A folder at this path."""
    path.mkdir(parents=True)
    return path


def test_of_a_folder_it_is_its_path(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder(tmp_path / "models/tiny")
    monkeypatch.chdir(tmp_path)
    assert name_of("models/tiny") == name_of(model) == CheckpointName("", str(model))
    assert find_here(name_of(model)) == model


def test_in_a_cache_it_is_its_place_there(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = name_of(folder(cache / "models/tiny"))
    assert name == CheckpointName("cache", "models/tiny")
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "other"))
    with pytest.raises(
        CheckpointError, match=f"^there is no {tmp_path}/other/models/tiny; copy it to that path on that host$"
    ):
        find_here(name)
    there = folder(tmp_path / "other/models/tiny")
    assert find_here(name) == there


def test_in_the_hubs_cache_likewise(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = folder(tmp_path / "hub/models--a--b/snapshots/1234")
    name = name_of(snapshot)
    assert name == CheckpointName("hub", "models--a--b/snapshots/1234")
    assert find_here(name) == snapshot


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (CheckpointName("cache", "models/smollm2-bf16"), "eventlm pull smollm2:bf16"),
        (CheckpointName("hub", "models--a--b/snapshots/1234"), "eventlm pull a/b --revision 1234"),
        (CheckpointName("hub", "models--a--b/snapshots/1234/b-Q8_0.gguf"), "eventlm pull a/b:b-Q8_0 --revision 1234"),
    ],
)
def test_a_host_without_it_is_told_how_to_get_it(name: CheckpointName, command: str, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^there is no \S+; run on that host: {command}$"):
        find_here(name)


def test_of_a_gguf_file_it_is_the_files(tmp_path: Path, cache: Path) -> None:
    """The folder's own name has the time of the file in it, which is another on another host."""
    from eventlm.models.fetch.gguf_folder import gguf_folder
    from tests.models.tiny_gguf import write_gguf

    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    made = gguf_folder(file)
    name = name_of(made)
    assert name == CheckpointName("", str(file))
    assert find_here(name) == made


def test_a_file_beside_its_folders_files_goes_by_the_folder(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no"):
        find_here(CheckpointName("", str(tmp_path / "none")))
