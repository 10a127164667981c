"""Tokenizers made of a GGUF file's metadata split texts as those do that the metadata were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

from eventlm.errors import CheckpointError
from eventlm.models.gguf.header import read_header
from eventlm.models.gguf.tokenizer_json import SPLITS, tokenizer_files
from eventlm.text.generation_config import load_generation_defaults
from eventlm.text.tokenizer import CheckpointTokenizer
from tests.checkpoints import make_tokenizer
from tests.models.gguf.files import add_keys, byte_level_keys, finish

TEXTS = (
    "Hello world",
    " leading, and  double   spaces\n\n\ttabs\r\n",
    "I'll've DON'T 12345 1 22 x=3.14e-5",
    "Größe naïve 東京 🚀 éé ﬁ",
    "<|im_start|>user\nHi<|im_end|>\n<think>",
    "</s><s> the end",
    "",
)
NORMAL, UNKNOWN, CONTROL, USER, BYTE = (
    *(TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE),
)


def files_of(folder: Path, metadata: dict[str, Any], *, architecture: str = "llama", vocab_size: int = 9999) -> Path:
    """A folder with the tokenizer files of these keys, without their beginning."""
    writer = GGUFWriter(folder / "model.gguf", architecture)
    add_keys(writer, {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    writer.add_tensor("a.weight", np.zeros((1, 32), np.float32))
    finish(writer)
    made = folder / "made"
    made.mkdir(exist_ok=True)
    for name, content in tokenizer_files(read_header(folder / "model.gguf"), vocab_size).items():
        (made / name).write_bytes(content)
    return made


def byte_level(folder: Path) -> dict[str, Any]:
    """The keys for the tokenizer in a folder, and ids of special tokens: the first, the last, and none."""
    return byte_level_keys(folder, "gpt-2") | {"bos_token_id": 0, "eos_token_id": 4, "padding_token_id": 4294967295}


def test_bytes_are_merged_as_in_the_checkpoint(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    wanted = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    keys = byte_level(tmp_path)
    template = "{{ messages[0].content }}<|im_end|>"
    made = CheckpointTokenizer(files_of(tmp_path, keys | {"tokenizer.chat_template": template}))
    for text in TEXTS:
        ids = made.encode(text, add_special_tokens=True)
        assert ids == wanted.encode(text).ids
        assert made.decode(ids) == text
    assert made.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    assert made.chat_template is not None
    assert made.chat_template.render([{"role": "user", "content": "Hi"}]) == "Hi<|im_end|>"
    made = CheckpointTokenizer(files_of(tmp_path, keys | {"add_bos_token": True, "add_eos_token": True}))
    assert made.encode("Hi", add_special_tokens=True) == [0, *wanted.encode("Hi").ids, 4]
    assert made.encode("Hi", add_special_tokens=False) == wanted.encode("Hi").ids


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_works(name: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    files = files_of(tmp_path, byte_level(tmp_path) | {"pre": name})
    made = CheckpointTokenizer(files)
    # The file does not say whether texts begin with the first token.
    assert (made.encode("x", add_special_tokens=True)[0] == 0) == SPLITS[name].adds_bos
    steps = json.loads((files / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    if name in GGUF_PRE_TOKENIZER_SPLITS:
        assert steps[0]["pattern"]["Regex"] == GGUF_PRE_TOKENIZER_SPLITS[name]
    digits = [one.removeprefix("Ġ") for one, _ in made._backend.pre_tokenizer.pre_tokenize_str("a 12345")]  # type: ignore[attr-defined]
    assert digits[-1] in ("12345", "45", "5"), digits
    for text in TEXTS:
        assert made.decode(made.encode(text, add_special_tokens=False)) == text


def sentence_piece(tokens: list[str], **changes: Any) -> dict[str, Any]:
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<think>": USER, "  ": USER}
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(index) for index in range(len(tokens))],
        "token_type": [kinds.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    """A vocabulary as SentencePiece has it."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    texts = [*TEXTS[:4], *["the world, the hello and the other world"] * 3]
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=180, show_progress=False))
    words = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    words.remove("▁▁")
    return ["<unk>", "<s>", "</s>", "<think>", "  ", *(f"<0x{byte:02X}>" for byte in range(256)), *words]


def test_characters_are_merged_as_transformers_does(pieces: list[str], tmp_path: Path) -> None:
    """Its Phi 3 has the spaces of the original Llama; Gemma puts none before a text, and ranks merges by ids."""
    for architecture, prefix in (("phi3", True), ("gemma", False)):
        keys = sentence_piece(pieces, add_space_prefix=prefix)
        wanted, _ = convert_gguf_tokenizer(
            architecture,
            {
                "tokenizer_type": "llama",
                **{name: keys[name] for name in ("tokens", "scores", "token_type")},
            },
        )
        made = CheckpointTokenizer(files_of(tmp_path, keys, architecture=architecture))
        for text in TEXTS:
            expected = wanted.encode(text, add_special_tokens=False).ids
            assert made.encode(text, add_special_tokens=True) == [1, *expected], (architecture, text)
            assert made.decode(expected) == wanted.decode(expected, skip_special_tokens=False)


def test_unknown_characters_become_bytes(pieces: list[str], tmp_path: Path) -> None:
    made = CheckpointTokenizer(files_of(tmp_path, sentence_piece(pieces, add_bos_token=False)))
    ids = made.encode("ж", add_special_tokens=True)
    assert [pieces[each] for each in ids] == ["▁", "<0xD0>", "<0xB6>"]
    assert b"".join(map(made.token_bytes, ids)) == " ж".encode()


def test_gemma_4_has_merges_of_characters(tmp_path: Path) -> None:
    """In their own order, without a space before a text; what no token is becomes bytes."""
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    keys = sentence_piece(tokens, model="gemma4", merges=["b c", "▁ a", "a b"], add_space_prefix=False)
    made = CheckpointTokenizer(files_of(tmp_path, keys, architecture="gemma4"))
    ids = made.encode("abc ab ж", add_special_tokens=True)
    assert [tokens[each] for each in ids] == ["<s>", "a", "bc", "▁a", "b", "▁", "<0xD0>", "<0xB6>"]
    assert made.decode(ids[1:]) == "abc ab ж"


def test_an_output_ends_where_a_turn_does(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    keys = byte_level(tmp_path)
    keys["tokens"] = [*keys["tokens"][:-3], "<|endoftext|>", "<|eom_id|>", "<|eot_id|>"]
    keys["merges"] = keys["merges"][:-3]
    keys["token_type"] = [*keys["token_type"][:-3], CONTROL, NORMAL, USER]
    last = len(keys["tokens"]) - 1
    folder = files_of(
        tmp_path,
        keys
        | {"eos_token_id": 1, "eot_token_id": 3}
        | {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.top_p": 0.75},
    )
    tokenizer = CheckpointTokenizer(folder)
    found = load_generation_defaults(folder, tokenizer)
    # `<|im_end|>` is token 4. `<|eom_id|>` is a word here.
    assert found.eos_token_ids == (1, 3, 4, last - 2, last)
    assert (found.temperature, found.top_k, found.top_p) == (0.5, 7, 0.75)
    assert last in tokenizer.special_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "key tokenizer.ggml.model is bert, and gpt2, llama and gemma4 are supported"),
        ({"model": None}, "key tokenizer.ggml.model is missing"),
        ({"pre": "nobody's"}, "key tokenizer.ggml.pre is nobody's, and of these gpt-2, "),
        ({"pre": None}, "key tokenizer.ggml.pre is missing"),
        ({"tokens": [1, 2]}, "key tokenizer.ggml.tokens is not an array of strings"),
        ({"tokens": "abc"}, "key tokenizer.ggml.tokens is a string, it must be an array"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "key tokenizer.ggml.tokens has the token 'a' twice"),
        ({"token_type": [1]}, "key tokenizer.ggml.token_type has 1 entries for 384 tokens"),
        ({"merges": ["ab"]}, "key tokenizer.ggml.merges has 'ab', which is not two tokens"),
        ({"merges": ["no such"]}, "key tokenizer.ggml.tokens and the other keys of the tokenizer do not make one: "),
        ({"merges": None}, "key tokenizer.ggml.merges is missing"),
        ({"add_bos_token": True, "bos_token_id": 384}, "key tokenizer.ggml.bos_token_id is no token, but texts"),
        ({"model": "llama", "merges": None}, "key tokenizer.ggml.scores is missing"),
        ({"model": "llama", "merges": None, "scores": [1.0]}, "key tokenizer.ggml.scores is not a number for each of"),
    ],
)
def test_what_makes_no_tokenizer_is_told(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    keys = {key: value for key, value in (byte_level(tmp_path) | changes).items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        files_of(tmp_path, keys)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def test_no_token_is_split_in_thousands_of_ways(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has a token of 4,097 characters; 4,096 are allowed"):
        files_of(tmp_path, sentence_piece(["<unk>", "<s>", "</s>", "a" * 4097]))


def test_what_the_library_says_is_cut(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        files_of(tmp_path, byte_level(tmp_path) | {"merges": [f"{'x' * 60_000} y"]})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("name", "is_stripped"), [("Phi-3 Mini", True), ("my-PHI3", True), ("Llama", False)])
def test_special_tokens_of_phi_3_take_the_spaces_behind_them(name: str, is_stripped: bool, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<think>", "<|endoftext|>", "<|user|>", "a"]
    kinds = [UNKNOWN, CONTROL, CONTROL, USER, CONTROL, CONTROL, NORMAL]
    folder = files_of(tmp_path, sentence_piece(tokens, token_type=kinds) | {"general.name": name})
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    expected = {"</s>", "<think>", "<|user|>"} if is_stripped else set()
    assert {token["content"] for token in added if token["rstrip"]} == expected


def test_a_vocabulary_is_not_larger_than_the_embedding(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="has 384 tokens, and the embedding 383 rows"):
        files_of(tmp_path, byte_level(tmp_path), vocab_size=383)
