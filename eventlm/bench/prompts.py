"""Synthetic prompts of a given number of tokens, and the tokenizer that counts them.

A prompt is a row of common words, each of which is one token in the vocabularies in use, so that the number of tokens
is known nearly to the token. Where the model's tokenizer can be had the words are taken from its own vocabulary and
each prompt is counted and corrected; else two small requests show how many tokens a word is on the server.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy
from msgspec import Struct

from eventlm.bench.draws import random_stream
from eventlm.bootstrap.model_source import find_tokenizer_folder
from eventlm.errors import UsageError
from eventlm.models.fetch.default_model import KNOWN_MODELS
from eventlm.models.fetch.hub import is_repo_id
from eventlm.models.fetch.pull import cached
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.tokenizer import CheckpointTokenizer, Tokenizer
from eventlm.worker.protocol import FAKE_MODEL

#: Words of four letters: one token with the space before it in the vocabularies of GPT-2, Llama, Qwen and Mistral, and
#: five bytes where tokens are bytes.
_WORDS = """
able also area army away baby back ball band bank base bear beat been best bird blue boat body book born both case
city cold come cost dark data date deal deep does done door down draw drop each east easy edge else even ever face
fact fall farm fast feel feet fell felt file film find fine fire fish five flat food foot form four free from full
game gave girl give glad goes gold gone good grew grow half hall hand hard have head hear heat held help here high
hold home hope hour idea inch into iron just keep kept kind king knew know lake land last late lead left less life
line list live long look lord lose lost made main make many mark mean meet mile mind mine miss moon more most move
much must name near need news next nine none nose note once only open over page paid pain pair part pass past
path plan play poor port post race rain read real rest rich ride ring rise road rock room rose rule safe said sail
salt same save seat seem seen self send sent ship shop show shut sick side sign sing size skin slow snow soft soil
sold some song soon sort star stay step stop such sure take talk tall team tell term test than that them then they
this thus time told took town tree trip true turn type unit upon vary very view wait walk wall want warm wash wave
week well went were west what when wide wife wild will wind wing wish with wood word wore work year your
"""
WORDS = _WORDS.split()
_MIN_WORDS = 100
_MAX_MENDS = 8
#: Above so many tokens per word a prompt is corrected by letters, not only by words.
_PIECEMEAL = 1.5
_TOKENIZER_FILE = "tokenizer.json"


#: Makes a text of about so many tokens; equal arguments make equal texts.
PromptMaker = Callable[[int, numpy.random.Generator], str]


class WordPrompts(Struct, frozen=True):
    """Prompts of common words on a server that counts `fixed` tokens for a prompt and so many per word."""

    fixed: float
    per_word: float

    def __call__(self, num_tokens: int, random: numpy.random.Generator) -> str:
        return word_text(max(round((num_tokens - self.fixed) / self.per_word), 1), random)


class TokenizerPrompts:
    """Prompts from words of the tokenizer's own vocabulary, counted by it."""

    def __init__(self, tokenizer: Tokenizer, *, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._words = _vocabulary_words(tokenizer) or WORDS

    def __call__(self, num_tokens: int, random: numpy.random.Generator) -> str:
        words = _draw(self._words, num_tokens, random)
        text = " ".join(words)
        for _ in range(_MAX_MENDS):
            excess = self.count(text) - num_tokens
            if excess == 0:
                break
            per_word = max((num_tokens + excess) / len(words), 1.0)
            if per_word > _PIECEMEAL and abs(excess) < per_word:
                # Less than a word, of a tokenizer whose tokens are bytes or nearly so.
                text = text[: max(len(text) - excess, 1)] if excess > 0 else text + "s" * -excess
                continue
            num_words = max(len(words) - round(excess / per_word), 1)
            words = words[:num_words] + _draw(self._words, max(num_words - len(words), 0), random)
            text = " ".join(words)
        return text

    def count(self, text: str) -> int:
        """Tokens of `text`, with those that the server adds to a prompt."""
        return len(self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens))


class SharedPrefixes:
    """Puts one of `num_prefixes` common texts of `num_tokens` tokens before each prompt."""

    def __init__(self, make: PromptMaker, *, num_tokens: int, num_prefixes: int, seed: int) -> None:
        self.num_tokens = num_tokens
        self._prefixes = [make(num_tokens, random_stream(seed, "prefix", index)) for index in range(num_prefixes)]
        self._choice = random_stream(seed, "prefix choice")

    def before(self, text: str) -> str:
        """`text` after a prefix drawn at random."""
        return f"{self._prefixes[int(self._choice.integers(len(self._prefixes)))]} {text}"


def word_text(num_words: int, random: numpy.random.Generator) -> str:
    """Common words, drawn at random."""
    return " ".join(_draw(WORDS, num_words, random))


def fit_word_prompts(num_words: tuple[int, int], num_tokens: tuple[int, int]) -> WordPrompts:
    """Prompts for a server that counts so many tokens in two of different lengths. Raises UsageError for nonsense."""
    per_word = (num_tokens[1] - num_tokens[0]) / (num_words[1] - num_words[0])
    if per_word <= 0:
        raise UsageError(
            f"the server counts {num_tokens[0]} tokens in {num_words[0]} words and {num_tokens[1]} in {num_words[1]}: "
            "prompts of a given length cannot be made from that; give --tokenizer"
        )
    return WordPrompts(max(num_tokens[0] - per_word * num_words[0], 0.0), per_word)


def _draw(words: list[str], count: int, random: numpy.random.Generator) -> list[str]:
    return [words[index] for index in random.integers(len(words), size=count)]


def _vocabulary_words(tokenizer: Tokenizer) -> list[str]:
    """Plain lower-case words that are one token after a space; none if the vocabulary has hardly any."""
    tokens = dict.fromkeys(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
    words = [
        token[1:].decode("ascii")
        for token in tokens
        if len(token) > 3 and token.startswith(b" ") and token[1:].isalpha() and token[1:].islower()
    ]
    return words if len(words) >= _MIN_WORDS else []


def find_tokenizer(given: str, served_model: str) -> Tokenizer | None:
    """The tokenizer `given` (a folder or a model's name), else the served model's if it lies here, else None.

    Nothing is fetched that was not asked for, and of a repository of the Hugging Face hub no weights.
    Raises UsageError, CheckpointError or PullError for what is given and cannot be had.
    """
    if not given:
        return _of_served_model(served_model)
    folder = find_tokenizer_folder(given)
    return FakeTokenizer() if folder is None else CheckpointTokenizer(folder)


def _of_served_model(name: str) -> Tokenizer | None:
    if name == FAKE_MODEL:
        return FakeTokenizer()
    folder: Path | None = None
    if name in KNOWN_MODELS:
        folder = cached(name)
    elif Path(name).is_absolute():
        folder = Path(name)
    elif is_repo_id(name) and isinstance(path := huggingface_hub.try_to_load_from_cache(name, _TOKENIZER_FILE), str):
        folder = Path(path).parent
    return CheckpointTokenizer(folder) if folder is not None and (folder / _TOKENIZER_FILE).is_file() else None
