"""Tokenizers: text to token ids, and token ids to bytes.

A checkpoint's tokenizer.json is read by the `tokenizers` library itself. Decoding does not go through that library:
at load, each token is turned into the bytes that it stands for, so that text can be made from any cut of the output
without ever splitting a character. Output continues a prompt, so the decoders' stripping of a leading space, which is
meant for whole texts, is left out.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from eventlm.errors import CheckpointError
from eventlm.server.chat_template import ChatTemplate


class Tokenizer(ABC):
    """What the server needs of a tokenizer.

    `special_tokens` are those that a chat template sees by name, `special_bytes` what each special token stands for by
    its id; `chat_template` is None where the model has none. Token ids are below `vocab_size`.
    """

    vocab_size: int
    special_tokens: dict[str, Any]
    special_bytes: dict[int, bytes]
    eos_token_id: int | None
    chat_template: ChatTemplate | None

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`. Safe to call from several threads, and lets others run meanwhile.

        Raises UnicodeEncodeError for a lone surrogate.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for special tokens and for ids without a token."""

    def raw_token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, special ones included."""
        return self.special_bytes.get(token_id) or self.token_bytes(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of these tokens, special ones included; U+FFFD for parts of characters."""
        return b"".join(map(self.raw_token_bytes, token_ids)).decode(errors="replace")

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return [self.raw_token_bytes(token_id).decode(errors="replace") for token_id in token_ids]


class CheckpointTokenizer(Tokenizer):
    """The tokenizer of a checkpoint folder: tokenizer.json and the small files beside it."""

    def __init__(self, folder: Path) -> None:
        self._backend = _read_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        self._mark_special()
        source = _chat_template_source(folder, config)
        self.chat_template = ChatTemplate(source, self.special_tokens) if source is not None else None
        eos_token = self.special_tokens.get("eos_token")
        self.eos_token_id = self._backend.token_to_id(eos_token) if isinstance(eos_token, str) else None
        self._bytes = _token_bytes_table(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self.special_bytes = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
        self.vocab_size = len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call releases the interpreter lock while it works, the single one does not.
        try:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            # What the library says of a lone surrogate; this says it in the words of Python.
            text.encode()
            raise
        return list(encoding.ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        # Unlike output, which continues a prompt, a whole text loses the space that its encoding put before it.
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def _mark_special(self) -> None:
        """Tokens that the configuration names (end of sequence and so on) are special even if tokenizer.json forgot."""
        names: list[str] = []
        for value in self.special_tokens.values():
            names += value if isinstance(value, list) else [value]
        known = [name for name in names if self._backend.token_to_id(name) is not None]
        self._backend.add_special_tokens(
            [tokenizers.AddedToken(name, special=True, normalized=False) for name in known]
        )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json; a checkpoint folder needs one (tokenizer.model alone is not enough)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
    # Prompts are never cut or padded behind the client's back.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a JSON object: {error}") from error


def _token_text(value: Any) -> str | None:
    """A special token is written as a string or as `{"content": ...}`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any], special_tokens_map: dict[str, Any]) -> dict[str, Any]:
    """Names and texts of the special tokens; tokenizer_config.json goes before special_tokens_map.json."""
    tokens: dict[str, Any] = {}
    for name, value in {**special_tokens_map, **config}.items():
        if name.endswith("_token") and (text := _token_text(value)) is not None:
            tokens[name] = text
        elif name == "additional_special_tokens" and isinstance(value, list):
            tokens[name] = [text for text in map(_token_text, value) if text is not None]
    return tokens


def _chat_template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the older places: tokenizer_config.json, one template or several with names."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8: {error}") from error
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_bytes_table(backend: tokenizers.Tokenizer) -> list[bytes]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    to_bytes = _TokenBytes(json.loads(backend.to_str()).get("decoder"))
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id not in special:
            table[token_id] = to_bytes(token)
    return table


class _TokenBytes:
    """The bytes of one token under a decoder as tokenizer.json describes it."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        #: Without a decoder the library joins tokens with spaces.
        self._prefix = "" if decoder else " "
        if decoder:
            self._add(decoder)

    def __call__(self, token: str) -> bytes:
        if self._byte_level and all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self._replacements:
            token = token.replace(old, new)
        return (self._prefix + token).encode()

    def _add(self, decoder: dict[str, Any]) -> None:
        match decoder:
            case {"type": "Sequence", "decoders": list(parts)}:
                for part in parts:
                    self._add(part)
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(replacement)}:
                self._replacements.append((replacement, " "))
            case {"type": "Fuse" | "Strip"}:
                pass
            case _:
                raise CheckpointError(
                    f"tokenizer.json has a decoder of type {decoder.get('type')!r}, which is not supported; "
                    "supported are ByteLevel, ByteFallback, Replace, Metaspace, Fuse, Strip and sequences of them"
                )


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stays, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()
