"""The tokenizer files that the metadata of a GGUF file stands for: tokenizer.json and those beside it. Loads no torch.

They are made here, not by transformers, which takes a split that it does not know for GPT-2's. How text is split before
its bytes are merged is no part of a GGUF file, only its name is; https://github.com/ggml-org/llama.cpp, in
`src/llama-vocab.cpp`, has what follows from each name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers
from gguf.constants import Keys, TokenType
from msgspec import json

from eventlm.errors import CheckpointError
from eventlm.models.gguf.header import GgufHeader, quoted

_Json = dict[str, Any]

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


class _Split(NamedTuple):
    """How text is split before BPE: by patterns, one after the other, or by GPT-2's pattern alone if there are none.

    has_single_digits: before all else each digit is one word. ignores_merges: a word that is a token is that token.
    adds_bos: where the file does not say. form: of Unicode, that text gets first.
    """

    patterns: tuple[str, ...] = ()
    has_single_digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    form: str = ""


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|{_WORDS}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _marked_words(digits: str) -> str:
    """Marks belong to words."""
    words = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    return rf"{_CONTRACTIONS}|{words}|{digits}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(suffix: str, digits: str) -> str:
    """Words begin at capital letters."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT2, _DIGITS = _Split(), _Split(has_single_digits=True)
_LLAMA3 = _Split((_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_DBRX = _Split((_words(r"\p{N}{1,3}"),))
_QWEN2 = _Split((_words(r"\p{N}"),))
_GPT4O = _Split((_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))
#: By `tokenizer.ggml.pre`.
SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "a.x-4.0", "mellum", "exaone4", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "command-r": _DIGITS._replace(form="NFC"),
    "olmo": _GPT2._replace(form="NFC"),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _DBRX),
    "qwen2": _QWEN2._replace(form="NFC"),
    "qwen35": _Split((_marked_words(r"\p{N}"),), form="NFC"),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    "tekken": _Split((_cased("", r"\p{N}"),), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "seed-coder": _Split((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "deepseek-coder": _Split(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}

#: SentencePiece's space.
_SPACE = "\u2581"
#: Tokens that end an output, whatever the metadata say; not every converter notes the end of a turn.
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
        *("<EOT>", "<eos>", "<turn|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
    }
)
_END_KEYS = (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
_SPECIAL_KEYS = {
    "bos_token": Keys.Tokenizer.BOS_ID,
    "eos_token": Keys.Tokenizer.EOS_ID,
    "unk_token": Keys.Tokenizer.UNK_ID,
    "pad_token": Keys.Tokenizer.PAD_ID,
}
#: Fields of generation_config.json and the keys of what the authors recommend.
_SAMPLING: dict[str, tuple[str, type[Any]]] = {
    "temperature": (Keys.General.SAMPLING_TEMP, float),
    "top_k": (Keys.General.SAMPLING_TOP_K, int),
    "top_p": (Keys.General.SAMPLING_TOP_P, float),
    "min_p": (Keys.General.SAMPLING_MIN_P, float),
    "repetition_penalty": (Keys.General.SAMPLING_PENALTY_REPEAT, float),
}
#: Architectures whose merges are ranked by the ids of their tokens, not by scores, and whose tokens of spaces are no
#: longer SentencePiece's.
_GEMMA = ("gemma", "gemma2", "gemma3")
#: The only special tokens of Phi 3 that do not take the spaces behind them. It is known by its name, as in llama.cpp.
_PHI3_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
#: Longest token whose merges are made of scores, which takes time by the square of its length.
_MAX_CHARACTERS = 4096


def tokenizer_files(header: GgufHeader, vocab_size: int) -> dict[str, bytes]:
    """tokenizer.json and what belongs to it, by the names of the files. `vocab_size` is that of the weights.

    Raises CheckpointError, naming the key, for a tokenizer that cannot be made.
    """
    return _Reader(header, vocab_size).files()


class _Reader:
    def __init__(self, header: GgufHeader, vocab_size: int) -> None:
        self._header = header
        self._tokens: list[str] = self._strings(Keys.Tokenizer.LIST)
        if len(self._tokens) > vocab_size:
            self._refuse(
                Keys.Tokenizer.LIST, f"has {len(self._tokens):,} tokens, and the embedding {vocab_size:,} rows"
            )
        self._types: list[int] = header.get(Keys.Tokenizer.TOKEN_TYPE, list, [TokenType.NORMAL] * len(self._tokens))
        if len(self._types) != len(self._tokens) or not isinstance(self._types[0], int):
            self._refuse(
                Keys.Tokenizer.TOKEN_TYPE, f"has {len(self._types):,} entries for {len(self._tokens):,} tokens"
            )

        name = header.get(Keys.General.NAME, str, "").lower()
        self._is_phi3 = "phi-3" in name or "phi3" in name
        self._is_gemma = header.get(Keys.General.ARCHITECTURE, str) in _GEMMA

    def files(self) -> dict[str, bytes]:
        special = {name: self._tokens[index] for name, key in _SPECIAL_KEYS.items() if (index := self._id(key)) >= 0}
        files = {
            "tokenizer.json": json.encode(self._tokenizer()),
            "tokenizer_config.json": json.encode(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "clean_up_tokenization_spaces": False,
                    **special,
                }
            ),
            "generation_config.json": json.encode(self._generation()),
        }
        template = self._header.get(Keys.Tokenizer.CHAT_TEMPLATE, str)
        if template is not None:
            files["chat_template.jinja"] = template.encode()
        try:
            tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises plain Exception
            self._refuse(
                Keys.Tokenizer.LIST, f"and the other keys of the tokenizer do not make one: {quoted(str(error))}"
            )
        return files

    def _tokenizer(self) -> _Json:
        kind = self._header.need(Keys.Tokenizer.MODEL, str)
        if kind == "gpt2":
            parts, adds_bos = self._byte_level()
        elif kind in ("llama", "gemma4"):
            parts, adds_bos = self._sentence_piece(), True
        else:
            self._refuse(Keys.Tokenizer.MODEL, f"is {kind:.80}, and gpt2, llama and gemma4 are supported")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added_tokens()),
            "post_processor": self._post_processor(adds_bos),
            **parts,
        }

    def _byte_level(self) -> tuple[_Json, bool]:
        """The model of BPE over bytes, its splits and decoder; and whether texts begin with the first token."""
        name = self._header.need(Keys.Tokenizer.PRE, str)
        if name not in SPLITS:
            self._refuse(Keys.Tokenizer.PRE, f"is {name:.80}, and of these {', '.join(SPLITS)} are supported")
        split = SPLITS[name]
        steps: list[_Json] = [{"type": "Digits", "individual_digits": True}] if split.has_single_digits else []
        for pattern in split.patterns:
            steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        parts = {
            "normalizer": {"type": split.form} if split.form else None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [*steps, {**byte_level, "use_regex": not split.patterns}],
            },
            "model": self._bpe(self._merges(), ignore_merges=split.ignores_merges),
            "decoder": {**byte_level, "use_regex": True},
        }
        return parts, split.adds_bos

    def _sentence_piece(self) -> _Json:
        """The same for BPE over characters. Unknown ones are written as bytes, and spaces as U+2581."""
        if self._is_gemma:
            self._tokens = [token if token.strip(" ") else _SPACE * len(token) for token in self._tokens]
        has_prefix = self._header.get(Keys.Tokenizer.ADD_PREFIX, bool, True)
        replace: _Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        steps = [{"type": "Prepend", "prepend": _SPACE}, replace] if has_prefix else [replace]
        decoders: list[_Json] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if has_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        merges = self._merges() if Keys.Tokenizer.MERGES in self._header.metadata else self._merges_of_scores()
        unknown = self._id(Keys.Tokenizer.UNK_ID)
        return {
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": None,
            "model": self._bpe(
                merges,
                unk_token=self._tokens[unknown] if unknown >= 0 else None,
                fuse_unk=True,
                byte_fallback=TokenType.BYTE in self._types,
            ),
            "decoder": {"type": "Sequence", "decoders": decoders},
        }

    def _bpe(self, merges: list[list[str]], **options: Any) -> _Json:
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        if len(vocabulary) < len(self._tokens):
            twice = next(token for index, token in enumerate(self._tokens) if vocabulary[token] != index)
            self._refuse(Keys.Tokenizer.LIST, f"has the token {twice[:80]!r} twice")
        return {"type": "BPE", "vocab": vocabulary, "merges": merges, **options}

    def _merges(self) -> list[list[str]]:
        merges = []
        for merge in self._strings(Keys.Tokenizer.MERGES):
            between = merge.find(" ", 1)
            if between < 0:
                self._refuse(Keys.Tokenizer.MERGES, f"has {merge[:80]!r}, which is not two tokens")
            merges.append([merge[:between], merge[between + 1 :]])
        return merges

    def _merges_of_scores(self) -> list[list[str]]:
        """Each way to make a token of two others, the best token's first: as transformers makes them."""
        ids = {token: index for index, token in enumerate(self._tokens)}
        longest = max(map(len, self._tokens))
        if longest > _MAX_CHARACTERS:
            self._refuse(Keys.Tokenizer.LIST, f"has a token of {longest:,} characters; {_MAX_CHARACTERS:,} are allowed")
        if self._is_gemma:
            scores: list[float] = [-index for index in range(len(self._tokens))]
        else:
            scores = self._header.need(Keys.Tokenizer.SCORES, list)
        if len(scores) != len(self._tokens) or not isinstance(scores[0], int | float):
            self._refuse(Keys.Tokenizer.SCORES, f"is not a number for each of {len(self._tokens):,} tokens")
        ranked: list[tuple[float, int, int, str, str]] = []
        for token, score in zip(self._tokens, scores, strict=True):
            pairs = [
                (token[:end], token[end:]) for end in range(1, len(token)) if token[:end] in ids and token[end:] in ids
            ]
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
            ranked += [(score, len(left), len(right), left, right) for left, right in pairs]
        ranked.sort(key=lambda entry: entry[:3], reverse=True)
        return [[left, right] for *_, left, right in ranked]

    def _added_tokens(self) -> Iterator[_Json]:
        """Those that are found in a text before it is split."""
        ends = {*self._ends()}
        for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            is_special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or index in ends
            if token and (is_special or kind == TokenType.USER_DEFINED):
                flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
                rstrip = self._is_phi3 and token not in _PHI3_UNSTRIPPED
                yield {"id": index, "content": token, **flags, "rstrip": rstrip, "special": is_special}

    def _post_processor(self, adds_bos: bool) -> _Json | None:
        """What puts the first and the last token around a text."""
        first: list[int] = []
        last: list[int] = []
        for key, id_key, ids, default in (
            (Keys.Tokenizer.ADD_BOS, Keys.Tokenizer.BOS_ID, first, adds_bos),
            (Keys.Tokenizer.ADD_EOS, Keys.Tokenizer.EOS_ID, last, False),
        ):
            if self._header.get(key, bool, default):
                ids.append(self._id(id_key))
                if ids[-1] < 0:
                    self._refuse(id_key, "is no token, but texts are to have it around them")
        if not first and not last:
            return None

        def around(*names: str) -> list[_Json]:
            texts = [{"Sequence": {"id": name, "type_id": 0}} for name in names]
            before, after = (
                [{"SpecialToken": {"id": self._tokens[i], "type_id": 0}} for i in ids] for ids in (first, last)
            )
            return [part for text in texts for part in (*before, text, *after)]

        return {
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": around("A", "B"),
            "special_tokens": {
                self._tokens[index]: {"id": self._tokens[index], "ids": [index], "tokens": [self._tokens[index]]}
                for index in (*first, *last)
            },
        }

    def _generation(self) -> _Json:
        recommended = {field: self._header.get(key, kind) for field, (key, kind) in _SAMPLING.items()}
        return {
            **{field: value for field, value in recommended.items() if value is not None},
            "eos_token_id": self._ends(),
        }

    def _ends(self) -> list[int]:
        """Ids of tokens that end an output."""
        ends = [index for key in _END_KEYS if (index := self._id(key)) >= 0]
        special = (TokenType.CONTROL, TokenType.USER_DEFINED)
        ends += [index for index, token in enumerate(self._tokens) if token in _ENDS and self._types[index] in special]
        return list(dict.fromkeys(ends))

    def _id(self, key: str) -> int:
        """A token's id; -1 without one. Some files have 2**32 - 1 for none."""
        index: int = self._header.get(key, int, -1)
        return index if 0 <= index < len(self._tokens) else -1

    def _strings(self, key: str) -> list[str]:
        values = self._header.need(key, list)
        if not values or not isinstance(values[0], str):
            self._refuse(key, "is not an array of strings")
        return list(values)

    def _refuse(self, key: str, why: str) -> Any:
        raise CheckpointError(f"{self._header.path}: key {key} {why}; take another file of the model")
