"""A checkpoint's tokenizer: the tokenizer itself, its special tokens, and the bytes of each token.

The server turns tokens into text by these bytes, and the worker masks tokens by them, so both use this module.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.json_files import read_json_object
from eventlm.models.checkpoint.safetensors_header import not_downloaded

#: An id as the key of a JSON object. No vocabulary is larger.
_ID = re.compile("[0-9]{1,9}")
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerFiles(NamedTuple):
    """`backend` with its special tokens marked, tokenizer_config.json, and special tokens by their names in it."""

    backend: tokenizers.Tokenizer
    config: dict[str, Any]
    special_tokens: dict[str, Any]

    def special_bytes(self) -> dict[int, bytes]:
        """The text of each special token, by its id."""
        added = self.backend.get_added_tokens_decoder()
        return {token_id: token.content.encode() for token_id, token in added.items() if token.special}

    def token_bytes(self) -> list[bytes]:
        """The bytes that each token adds to a text; none for special tokens and for ids without a token."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        special = self.special_bytes()
        decoder = self.backend.decoder
        # Its state is its part of tokenizer.json. To write all of that takes as long as to read it.
        to_bytes = _TokenBytes(json.loads(decoder.__getstate__()) if decoder is not None else None)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            if token_id not in special:
                table[token_id] = to_bytes(token)
        return table


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer of a checkpoint folder. Raises CheckpointError."""
    backend = _read_backend(folder)
    config = read_json_object(folder / "tokenizer_config.json", required=False)
    special_tokens = _special_tokens(config, read_json_object(folder / "special_tokens_map.json", required=False))
    _add_tokens(backend, _added_tokens(folder, config))
    _mark_special(backend, special_tokens)
    return TokenizerFiles(backend, config, special_tokens)


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json; a checkpoint folder needs one (tokenizer.model alone is not enough)"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        problem = not_downloaded(content)
        raise CheckpointError(f"{path}: {problem or f'not a tokenizer: {error}'}") from error
    # Prompts are never cut or padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _token_text(value: Any) -> str | None:
    """A special token is written as a string or as `{"content": ...}`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any], special_tokens_map: dict[str, Any]) -> dict[str, Any]:
    """Names and texts of the special tokens; tokenizer_config.json overrides special_tokens_map.json."""
    tokens: dict[str, Any] = {}
    for name, value in {**special_tokens_map, **config}.items():
        if name.endswith("_token") and (text := _token_text(value)) is not None:
            tokens[name] = text
        elif name == "additional_special_tokens" and isinstance(value, list):
            tokens[name] = [text for text in map(_token_text, value) if text is not None]
    return tokens


def _added_tokens(folder: Path, config: dict[str, Any]) -> list[tuple[int, tokenizers.AddedToken]]:
    """Tokens with their ids, from tokenizer_config.json, else from the older added_tokens.json."""
    declared = config.get("added_tokens_decoder")
    if declared is None:
        found = read_json_object(folder / "added_tokens.json", required=False).items()
        return [(token_id, tokenizers.AddedToken(text)) for text, token_id in found if isinstance(token_id, int)]
    if not isinstance(declared, dict):
        return []
    return [
        (int(token_id), tokenizers.AddedToken(text, **{name: entry.get(name) is True for name in _ADDED_TOKEN_FLAGS}))
        for token_id, entry in declared.items()
        if _ID.fullmatch(token_id) and isinstance(entry, dict) and (text := _token_text(entry)) is not None
    ]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[tuple[int, tokenizers.AddedToken]]) -> None:
    """Add those that tokenizer.json lacks and that can keep their ids: that of the vocabulary, or the next one."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(tokens, key=lambda each: each[0]):
        there = backend.token_to_id(token.content)
        following = backend.get_vocab_size(with_added_tokens=True)
        if token.content not in known and token_id == (following if there is None else there):
            backend.add_tokens([token])


def _mark_special(backend: tokenizers.Tokenizer, special_tokens: dict[str, Any]) -> None:
    """Make tokens special that the configuration names (end of sequence and so on), if tokenizer.json does not."""
    names: list[str] = []
    for value in special_tokens.values():
        names += value if isinstance(value, list) else [value]
    known = [name for name in names if backend.token_to_id(name) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in known])


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
        if self._byte_level:
            try:
                return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:
                pass
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
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()
