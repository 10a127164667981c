"""The fake worker's parameters, and its tokens: hashes of (seed, index, position)."""

from __future__ import annotations

import xxhash
from msgspec import Struct

from eventlm.types import WorkerEnd

MILLION = 1_000_000
#: Words of 8 bytes each; their bytes are the token ids.
WORD_BYTES = 8
WORDS = tuple(
    word.encode().ljust(WORD_BYTES)
    for word in [
        *("rewind,", "an event", "facts,", "a log of", "tokens", "größer", "日本,", "un été"),
        *("replay.", "blocks", "caché,", "schedule", "naïve:", "queued;", "🚀 go", "steps;"),
    ]
)
#: Ends that a fake worker may see, in the order in which it draws them.
ENDS: tuple[WorkerEnd, ...] = ("eos", "stop_token", "grammar")
EOS_TOKEN_ID = 257
#: A poisoned sequence does its harm in place of one of so many first tokens.
POISONED_PLACES = 8
#: Ids of pieces of text, in words of several bytes and in parts of characters.
FIRST_PIECE_ID = 260
NUM_PIECES = 764


class FakeParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the fake worker, times in nanoseconds, chances in parts per million."""

    base_ns: int = 2_000_000
    prefill_token_ns: int = 10_000
    decode_ns: int = 20_000
    context_token_ns: int = 10
    #: Chance that a token is the last, by each of the reasons that a worker can see.
    end_ppm: int = 0
    #: Chance that a step takes `late_factor` times as long.
    late_ppm: int = 0
    late_factor: int = 10
    #: Chance that the worker dies in the middle of a step.
    die_ppm: int = 0
    #: Chance that a step raises an error.
    raise_ppm: int = 0
    #: Chance that a step never ends.
    hang_ppm: int = 0
    #: Chance that a sequence kills every worker that is to make one of its first tokens.
    poison_ppm: int = 0
    #: Chance that a token is no byte of a word but one of the ids above the bytes, which stand for several bytes.
    piece_ppm: int = 0
    #: Chance that the logits of a token are not finite, as a broken model's are.
    nan_ppm: int = 0
    #: Whether it has recurrent layers. Then a token depends on the state in the sequence's slot, not on its position.
    recurrent: bool = False


def draw(*what: int | str) -> int:
    """A 64-bit hash of integers and strings: the fake worker's only source of chance."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, what)).encode())


def poisoned_place(parameters: FakeParameters, seed: int, index: int) -> int | None:
    """The position in its output after which a sequence kills its worker; None for one that does no harm."""
    if draw("poison", seed, index) % MILLION >= parameters.poison_ppm:
        return None
    return draw("place", seed, index) % POISONED_PLACES


def fake_token(seed: int, index: int, position: int, *, piece_ppm: int = 0) -> int:
    """The token of a sample at a position of its output: a byte of a word drawn for each stretch of a word's length.

    With a chance of `piece_ppm` it is a piece instead.
    """
    if piece_ppm and draw("piece", seed, index, position) % MILLION < piece_ppm:
        return FIRST_PIECE_ID + draw("which", seed, index, position) % NUM_PIECES
    word, byte = divmod(position, WORD_BYTES)
    return WORDS[draw("word", seed, index, word) % len(WORDS)][byte]


def state_token(seed: int, index: int, state: int) -> int:
    """The token of a sample after a state of recurrent layers: a letter."""
    return ord("a") + draw("state", seed, index, state) % 26
