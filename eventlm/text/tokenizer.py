"""Tokenizers: text to token ids, and token ids to bytes.

The `tokenizers` library reads a checkpoint's tokenizer.json and encodes. Outputs are decoded without it: each token is
turned into its bytes at load, so that text can be made from any part of an output without splitting a character. The
library would strip a leading space, which is right for whole texts only: outputs continue a prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.json_files import read_json_object
from eventlm.text.chat_template import ChatTemplate


class Tokenizer(ABC):
    """A tokenizer with its chat template, if it has one.

    special_tokens: those that a chat template uses by name. special_bytes: the bytes of each special token by its id.
    Token ids are below `vocab_size`. grammar_vocab_size: how many of them grammars know, if not all of the model's.
    config: tokenizer_config.json, empty if there is none.
    """

    vocab_size: int
    special_tokens: dict[str, Any]
    special_bytes: dict[int, bytes]
    eos_token_id: int | None
    chat_template: ChatTemplate | None
    grammar_vocab_size: int | None = None
    config: dict[str, Any] = {}

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`. Thread-safe; releases the interpreter lock.

        Raises UnicodeEncodeError for a lone surrogate.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for special tokens and unused ids."""

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
        # Only this needs the library.
        from eventlm.models.checkpoint.tokenizer_files import read_tokenizer

        files = read_tokenizer(folder)
        self._backend, self.special_tokens, self.config = files.backend, files.special_tokens, files.config
        self.chat_template = _chat_template(folder, files.config, self.special_tokens)
        eos_token = self.special_tokens.get("eos_token")
        self.eos_token_id = self._backend.token_to_id(eos_token) if isinstance(eos_token, str) else None
        self._bytes = files.token_bytes()
        self.special_bytes = files.special_bytes()
        self.vocab_size = len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call releases the interpreter lock while it works, the single one does not.
        try:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            # The library's error for a lone surrogate. Python's own is clearer.
            text.encode()
            raise
        return list(encoding.ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        # Unlike an output, a whole text loses the space that its encoding put before it.
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]


def _chat_template(folder: Path, config: dict[str, Any], special_tokens: dict[str, Any]) -> ChatTemplate | None:
    source = _chat_template_source(folder, config)
    try:
        return ChatTemplate(source, special_tokens) if source is not None else None
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: the chat template: {error}") from error


def _chat_template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the older files, which may have several templates with names."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8: {error}") from error
    template = config.get("chat_template") or read_json_object(folder / "chat_template.json", required=False).get(
        "chat_template"
    )
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def token_text(tokenizer: Tokenizer, token_id: int, *, as_token_id: bool = False) -> str:
    """The text of one token, with U+FFFD for parts of characters; or `token_id:` and its id."""
    if as_token_id:
        return f"token_id:{token_id}"
    return tokenizer.raw_token_bytes(token_id).decode(errors="replace")
