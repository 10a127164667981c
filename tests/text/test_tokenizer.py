"""Checkpoint tokenizers: same ids and same text as the tokenizers library, clear errors for broken folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import AutoTokenizer

from eventlm.errors import CheckpointError
from eventlm.text.detokenizer import Detokenizer
from eventlm.text.tokenizer import CheckpointTokenizer
from tests.checkpoints import edit_json
from tests.server.checkpoints import byte_fallback, byte_level

TEXTS = ["The quick brown fox", " leading space", "naïve 日本語 🙂", "tabs\tand\n\nlines ", "x=199!", "зъ ۞ 🧑‍🚀"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {"byte_level": byte_level(root / "bl"), "byte_fallback": byte_fallback(root / "bf")}


def decode(tokenizer: CheckpointTokenizer, token_ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer.token_bytes)
    return "".join(detokenizer.push([token_id]) for token_id in token_ids) + detokenizer.flush()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_and_text_as_the_library(folders: dict[str, Path], kind: str, text: str) -> None:
    tokenizer = CheckpointTokenizer(folders[kind])
    backend = Backend.from_file(str(folders[kind] / "tokenizer.json"))
    backend.no_truncation()
    for add_special_tokens in (True, False):
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert token_ids == backend.encode(text, add_special_tokens=add_special_tokens).ids
    # The library strips the space before a whole text; ours is a continuation.
    assert decode(tokenizer, token_ids).removeprefix(" " if kind == "byte_fallback" else "") == text
    assert backend.decode(token_ids) == text


@given(data=st.data())
def test_random_ids_decode_as_the_library_does(folders: dict[str, Path], data: st.DataObject) -> None:
    tokenizer = _cached(folders["byte_level"])
    backend = _cached_backend(folders["byte_level"])
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert decode(tokenizer, token_ids) == backend.decode(token_ids, skip_special_tokens=True)


_tokenizers: dict[Path, CheckpointTokenizer] = {}
_backends: dict[Path, Backend] = {}


def _cached(folder: Path) -> CheckpointTokenizer:
    return _tokenizers.setdefault(folder, CheckpointTokenizer(folder))


def _cached_backend(folder: Path) -> Backend:
    return _backends.setdefault(folder, Backend.from_file(str(folder / "tokenizer.json")))


def test_a_lone_surrogate_is_reported_by_its_position(folders: dict[str, Path]) -> None:
    with pytest.raises(UnicodeEncodeError) as caught:
        CheckpointTokenizer(folders["byte_level"]).encode("a\ud800", add_special_tokens=False)
    assert caught.value.start == 1


def test_special_tokens(folders: dict[str, Path]) -> None:
    tokenizer = CheckpointTokenizer(folders["byte_level"])
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    [eos] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert tokenizer.eos_token_id == eos
    assert tokenizer.token_bytes(eos) == b""
    [think] = tokenizer.encode("<think>", add_special_tokens=False)
    assert tokenizer.token_bytes(think) == b"<think>"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_tokens_that_the_configuration_names_become_special(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, pad_token="<think>", additional_special_tokens=["two words", "unheard of"])
    tokenizer = CheckpointTokenizer(folder)
    for text in ("<think>", "two words"):
        [token_id] = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.token_bytes(token_id) == b""


@pytest.mark.parametrize("place", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_tokenizer_json_forgot_are_transformers(tmp_path: Path, place: str) -> None:
    folder = byte_level(tmp_path, tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>")
    size = CheckpointTokenizer(folder).vocab_size
    quick = CheckpointTokenizer(folder).encode("ick", add_special_tokens=False)[0]
    texts = {size + 1: "<tool é>", size: "<image>", quick: "ick", size + 9: "<far>", 7: "<s>"}
    added: dict[str, Any] = {text: token_id for token_id, text in texts.items()}
    if place == "tokenizer_config.json":
        flags = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": False}
        decoder = {
            str(token_id): {"content": text, "special": text == "<image>", **flags} for text, token_id in added.items()
        }
        del decoder[str(size + 9)]
        edit_json(folder / place, added_tokens_decoder=decoder)
    else:
        (folder / place).write_text(json.dumps(added))
    ours, theirs = CheckpointTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("a <image> b", "a<tool é>b", "quick", "<s>a"):
        token_ids = ours.encode(text, add_special_tokens=False)
        assert token_ids == theirs.encode(text, add_special_tokens=False)
        assert decode(ours, token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
    assert ours.encode("<far>", add_special_tokens=False) != [size + 9]


@pytest.mark.parametrize("token_id", ["9" * 5000, str(2**70), "-1", "1.5", ""])
def test_an_added_token_whose_id_is_none_is_left_out(tmp_path: Path, token_id: str) -> None:
    folder = byte_level(tmp_path)
    before = CheckpointTokenizer(folder).encode("<x>", add_special_tokens=False)
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder={token_id: {"content": "<x>"}})
    assert CheckpointTokenizer(folder).encode("<x>", add_special_tokens=False) == before


def test_chat_template_sources(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]

    def rendered() -> str:
        template = CheckpointTokenizer(tmp_path).chat_template
        assert template is not None
        return template.render(messages)

    byte_level(tmp_path)
    assert CheckpointTokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert rendered() == "old"
    byte_level(
        tmp_path,
        chat_template=[{"name": "tool_use", "template": "t"}, {"name": []}, {"name": "default", "template": "named"}],
    )
    assert rendered() == "named"
    byte_level(tmp_path, chat_template="{{ bos_token }}config")
    assert rendered() == "<s>config"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}file")
    assert rendered() == "<|im_end|>file"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", b'{"version": ', "not a tokenizer"),
        ("tokenizer_config.json", b"[1", "tokenizer_config.json: not a JSON object"),
        ("tokenizer_config.json", b"[1]", "tokenizer_config.json: not a JSON object"),
        ("chat_template.jinja", b"Hi\n{% if %}", "the chat template: it does not compile: line 2: Expected"),
        ("chat_template.jinja", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_broken_folders(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    byte_level(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        CheckpointTokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.ByteLevel(),
        decoders.Metaspace(),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.WordPiece(),
    ],
    ids=lambda decoder: type(decoder).__name__,
)
def test_a_decoder_s_state_is_its_part_of_tokenizer_json(decoder: decoders.Decoder) -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoder
    assert json.loads(backend.decoder.__getstate__()) == json.loads(backend.to_str())["decoder"]


def test_an_unknown_decoder_is_named(tmp_path: Path) -> None:
    byte_level(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="WordPiece"):
        CheckpointTokenizer(tmp_path)
