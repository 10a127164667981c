"""Where tokenizers are found."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from eventlm.bench.draws import random_stream
from eventlm.bench.prompts import TokenizerPrompts, find_tokenizer
from eventlm.errors import CheckpointError, PullError, UsageError
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.tokenizer import CheckpointTokenizer
from tests.models.hub_server import HubServer
from tests.server.checkpoints import byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("tokenizer"))


def test_a_folder(folder: Path) -> None:
    assert isinstance(find_tokenizer(str(folder), "x"), CheckpointTokenizer)


def test_prompts_from_a_real_vocabulary_are_exact(folder: Path) -> None:
    tokenizer = CheckpointTokenizer(folder)
    make = TokenizerPrompts(tokenizer, add_special_tokens=True)
    for num_tokens in (20, 111, 500):
        text = make(num_tokens, random_stream(0, "prompt", num_tokens))
        assert abs(len(tokenizer.encode(text, add_special_tokens=True)) - num_tokens) <= 1


def test_the_fake_model() -> None:
    assert isinstance(find_tokenizer("fake", "x"), FakeTokenizer)
    assert isinstance(find_tokenizer("", "fake"), FakeTokenizer)


def test_a_served_model_that_lies_here(folder: Path) -> None:
    assert isinstance(find_tokenizer("", str(folder)), CheckpointTokenizer)


@pytest.mark.parametrize("name", ["gpt-x", "nobody/nothing", "/no/such/folder", "smollm2"])
def test_a_served_model_that_lies_elsewhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path))
    assert find_tokenizer("", name) is None


def test_a_repository_that_is_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = str(folder / "tokenizer.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: cached)
    assert isinstance(find_tokenizer("", "org/name"), CheckpointTokenizer)


def test_a_repository_is_fetched_without_its_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"model.safetensors": b"weights"}
    with HubServer(files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert isinstance(find_tokenizer("acme/tiny", "x"), CheckpointTokenizer)
        assert not any("model.safetensors" in path for path in hub.requests)
        del hub.files["tokenizer.json"]
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
        with pytest.raises(PullError, match=r"acme/tiny holds no tokenizer\.json"):
            find_tokenizer("acme/tiny", "x")


def test_a_missing_repository_is_reported_as_by_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = r"--tokenizer acme/tiny: there is no such folder, and acme/tiny is not complete in the cache .* forbids"
    with pytest.raises(PullError, match=expected):
        find_tokenizer("acme/tiny", "x")


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--tokenizer nowhere: no such folder"):
        find_tokenizer("nowhere", "fake")
    with pytest.raises(CheckpointError, match=r"--tokenizer .*: this folder has no tokenizer\.json"):
        find_tokenizer(str(tmp_path), "fake")
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"--tokenizer .*json: this is a file; give a folder with"):
        find_tokenizer(str(file), "fake")
