"""Which folder `--model` means, and what is said where there is no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bootstrap import model_source
from eventlm.bootstrap.model_source import find_model, find_tokenizer_folder
from eventlm.config import ModelConfig
from eventlm.errors import CheckpointError, PullError, UsageError
from tests.models.tiny_gguf import write_gguf


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_served_under_its_name(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(ModelConfig(model=str(checkpoint))) == (checkpoint, "Qwen3-0.6B")
    monkeypatch.chdir(checkpoint)
    assert find_model(ModelConfig(model=".")).served_name == "Qwen3-0.6B"
    assert find_model(ModelConfig(model=".", served_model_name="mine")).served_name == "mine"


def test_the_fake_model_has_no_folder() -> None:
    assert find_model(ModelConfig(model="fake", fake={"seed": 1})) == (None, "fake")


def test_parameters_of_the_fake_worker_need_the_fake_model(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="--fake is for the fake worker"):
        find_model(ModelConfig(model=str(checkpoint), fake={"seed": 1}))


def test_a_known_model_is_fetched_only_if_it_is_not_cached(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_source, "cached", lambda name: checkpoint)
    assert find_model(ModelConfig()) == (checkpoint, "smollm2")
    assert capsys.readouterr().err == ""

    pulled: list[str] = []
    monkeypatch.setattr(model_source, "cached", lambda name: None)
    monkeypatch.setattr(model_source, "pull", lambda name: pulled.append(name) or checkpoint)
    assert find_model(ModelConfig()) == (checkpoint, "smollm2")
    assert pulled == ["smollm2"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "smollm2 is not in the cache yet; fetching it once into" in captured.err
    with pytest.raises(PullError, match=r"smollm2 is not in the cache .*; `eventlm pull smollm2` fetches it"):
        find_model(ModelConfig(), may_fetch=False)
    assert pulled == ["smollm2"]


def test_a_failed_pull_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Path:
        raise PullError("no network")

    monkeypatch.setattr(model_source, "cached", lambda name: None)
    monkeypatch.setattr(model_source, "pull", fail)
    with pytest.raises(PullError, match="no network"):
        find_model(ModelConfig())


def test_a_repository_is_served_under_its_id(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[tuple[str, str, bool]] = []
    monkeypatch.setattr(
        model_source, "pull_repo", lambda *wanted, may_fetch: pulled.append((*wanted, may_fetch)) or checkpoint
    )
    assert find_model(ModelConfig(model="acme/tiny", revision="v1")) == (checkpoint, "acme/tiny")
    assert find_model(ModelConfig(model="acme/tiny", served_model_name="mine")).served_name == "mine"
    assert find_model(ModelConfig(model="acme/tiny"), may_fetch=False) == (checkpoint, "acme/tiny")
    assert pulled == [("acme/tiny", "v1", True), ("acme/tiny", "", True), ("acme/tiny", "", False)]
    with pytest.raises(UsageError, match="--fake is for the fake worker"):
        find_model(ModelConfig(model="acme/tiny", fake={"seed": 1}))


def test_a_folder_beats_a_repository(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent.parent)
    model = f"{checkpoint.parent.name}/{checkpoint.name}"
    assert find_model(ModelConfig(model=model)) == (Path(model), "Qwen3-0.6B")
    with pytest.raises(UsageError, match=r"--revision v1: --model .* is no repository"):
        find_model(ModelConfig(model=model, revision="v1"))


def test_neither_a_folder_nor_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(repo_id: str, revision: str, *, may_fetch: bool) -> Path:
        raise PullError("https://hub has no repository acme/tiny")

    monkeypatch.setattr(model_source, "pull_repo", fail)
    with pytest.raises(PullError, match="--model acme/tiny: there is no such folder, and https://hub has no"):
        find_model(ModelConfig(model="acme/tiny"))


def test_what_is_no_checkpoint_is_explained(tmp_path: Path, checkpoint: Path) -> None:
    def error_of(model: object) -> str:
        with pytest.raises(CheckpointError) as caught:
            find_model(ModelConfig(model=str(model)))
        return str(caught.value)

    assert "no such folder; give the folder of a Hugging Face checkpoint" in error_of("/nowhere/at/all")
    assert "no such folder; did you mean smollm2?" in error_of("smolm2")
    assert "no such file; give the folder of a Hugging Face checkpoint" in error_of("/nowhere/at/all.gguf")
    assert "this is a file, and no GGUF file; give the folder" in error_of(checkpoint / "config.json")
    assert "no config.json in this folder; the folder Qwen3-0.6B in it has one" in error_of(tmp_path)
    (checkpoint / "config.json").unlink()
    assert "no config.json in this folder; give the folder of a Hugging Face checkpoint" in error_of(checkpoint)
    (checkpoint / "tiny.gguf").touch()
    assert "no config.json in this folder; to run tiny.gguf, give its path" in error_of(checkpoint)
    assert "tiny.gguf: the file is empty; download it again" in error_of(checkpoint / "tiny.gguf")


def test_a_gguf_file_is_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    write_gguf(tmp_path / "tiny-Q4_1.gguf")
    found = find_model(ModelConfig(model=str(tmp_path / "tiny-Q4_1.gguf")))
    assert found.served_name == "tiny-Q4_1"
    assert found.folder is not None
    assert found.folder.name.startswith("tiny-Q4_1-")
    assert (found.folder / "config.json").is_file()
    assert find_tokenizer_folder(str(tmp_path / "tiny-Q4_1.gguf")) == found.folder
    (tmp_path / "tiny-Q4_1.gguf").rename(tmp_path / "without an ending")
    assert find_model(ModelConfig(model=str(tmp_path / "without an ending"))).served_name == "without an ending"
    (tmp_path / "without an ending").rename(tmp_path / "big-00001-of-00001.gguf")
    assert find_model(ModelConfig(model=str(tmp_path / "big-00001-of-00001.gguf"))).served_name == "big"
