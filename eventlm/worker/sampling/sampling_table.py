"""How a worker samples each of its sequences: one slot for each, filled when the sequence arrives.

Numbers lie in one array that a step gathers by slot. `needs` says which processors a sequence uses, so that a batch
pays only for those that one of its sequences uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eventlm.kernels.cpu.decoder import DrawRows
from eventlm.sampling_params import SamplingParams
from eventlm.types import SequenceId
from eventlm.worker.sampling.noise import sequence_key
from eventlm.worker.sampling.token_counts import TokenCounts
from eventlm.worker.sampling.vocabulary_masks import Masks
from eventlm.worker.sequence_table import WorkerSequence

#: Bits of `needs`. How it draws: GREEDY, or among the most likely (MASKED), or from the whole vocabulary.
GREEDY, MASKED = 1, 2
#: What changes its logits before that: only these ids, never those ids, biases, penalties, its grammar.
ALLOWED, BANNED, BIASED, PENALIZED, GRAMMAR = 4, 8, 16, 32, 64
PROCESSED = ALLOWED | BANNED | BIASED | PENALIZED | GRAMMAR

#: top_k 0 and top_p infinity keep all; min_p as its logarithm, minus infinity if it keeps all.
PARAMS_DTYPE = np.dtype(
    [
        ("needs", np.uint8),
        ("key", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("log_min_p", np.float32),
        ("min_tokens", np.int64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("counts_row", np.int64),
    ]
)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, on a processor its very memory. What the device has still to do is not waited for.

    A copy from memory that is not pinned would wait; what is pinned here is kept until it has been copied.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def column(params_S: np.ndarray, name: str, device: torch.device) -> Tensor:
    """One of the parameters, [S, 1]."""
    return to_device(params_S[name].copy(), device)[:, None]


class TokenLists(NamedTuple):
    """The parameters of a sequence that are lists of token ids; ids beyond the vocabulary are left out.

    banned: the bad words of one token. ends: what `min_tokens` bans. bad_words: those of several tokens.
    """

    sequence: WorkerSequence
    allowed: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    banned: np.ndarray
    ends: np.ndarray
    bad_words: tuple[tuple[int, ...], ...]


class FreeDraw(NamedTuple):
    """How a sequence draws from the whole vocabulary, once it has `min_tokens`; greedily at temperature 0."""

    temperature: float
    key: int
    min_tokens: int


class SampledRows(NamedTuple):
    """S rows that sample: their slots int64 [S], positions in the output int64 [S], and parameters [S].

    masks: what grammars allow, a bit a token, uint8 [S, mask_bytes]; of a row without a grammar it means nothing. None
    where no row has one.
    """

    slots: np.ndarray
    positions: np.ndarray
    params: np.ndarray
    masks: np.ndarray | None = None

    def masked(self, masks: Masks) -> SampledRows:
        """With what grammars allow."""
        self.params["needs"][masks.numbers] |= GRAMMAR
        bits = np.zeros((len(self.slots), masks.bits.shape[1]), dtype=np.uint8)
        bits[masks.numbers] = masks.bits
        return self._replace(masks=bits)

    def take(self, numbers: np.ndarray) -> SampledRows:
        """Some of them, in this order."""
        masks = self.masks[numbers] if self.masks is not None else None
        return SampledRows(self.slots[numbers], self.positions[numbers], self.params[numbers], masks)


class SamplingTable:
    """The slots. `counts` has the tokens of those sequences that use penalties, and of no others."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._params = np.zeros(16, dtype=PARAMS_DTYPE)
        self._slots: dict[SequenceId, int] = {}
        #: Of the sequences that draw from the whole vocabulary, with nothing but `min_tokens` to change their logits.
        self._free_draws: dict[SequenceId, FreeDraw] = {}
        #: Of those whose logits depend on the tokens that they have had.
        self._with_history: set[SequenceId] = set()
        self._free = list(range(len(self._params)))
        #: By slot.
        self.lists: dict[int, TokenLists] = {}
        self.counts = TokenCounts()

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, sequence: WorkerSequence) -> None:
        """Take a sequence in, with whatever history it brings."""
        if not self._free:
            size = len(self._params)
            self._params = np.resize(self._params, 2 * size)
            self._free = list(range(size, 2 * size))
        slot = self._slots[sequence.id] = self._free.pop()
        params, num_output = sequence.params, sequence.position
        record = self._params[slot]
        lists = _token_lists(sequence, self._vocab_size)
        needs = _needs(params, lists, self._vocab_size)
        if needs & (ALLOWED | BANNED | BIASED) or params.min_tokens > num_output:
            self.lists[slot] = lists
        record["needs"] = needs
        record["key"] = key = sequence_key(params.noise_seed, sequence.id.index)
        record["temperature"] = params.temperature or 1.0
        record["top_k"] = params.top_k if params.top_k < self._vocab_size else 0
        record["top_p"] = params.top_p if params.top_p < 1.0 else np.inf
        record["log_min_p"] = np.log(params.min_p) if params.min_p > 0.0 else -np.inf
        record["min_tokens"] = params.min_tokens
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            record[name] = getattr(params, name)
        if not needs & ~GREEDY and not params.grammar:
            temperature = 0.0 if needs & GREEDY else params.temperature
            self._free_draws[sequence.id] = FreeDraw(temperature, key, params.min_tokens)
        if needs & PENALIZED or lists.bad_words or params.grammar:
            self._with_history.add(sequence.id)
        record["counts_row"] = -1
        if needs & PENALIZED:
            record["counts_row"] = self.counts.add(sequence.token_ids, sequence.num_prompt_tokens)

    def remove(self, identity: SequenceId) -> None:
        """Forget a sequence, if it has a slot."""
        slot = self._slots.pop(identity, None)
        if slot is None:
            return
        self.lists.pop(slot, None)
        self._free_draws.pop(identity, None)
        self._with_history.discard(identity)
        if self._params[slot]["needs"] & PENALIZED:
            self.counts.remove(int(self._params[slot]["counts_row"]))
        self._free.append(slot)

    def draw_rows(self, sequences: Sequence[WorkerSequence]) -> DrawRows | None:
        """How these draw; None if some do not from the whole vocabulary and from logits as the model gives them.

        Without numpy, for what a step does between two passes over a small model's weights it does out of the
        processor's caches, and this takes a quarter of the time then.
        """
        temperatures, keys, positions = [], [], []
        for sequence in sequences:
            draw, position = self._free_draws.get(sequence.id), sequence.position
            if draw is None or position < draw.min_tokens:
                return None
            temperatures.append(draw.temperature)
            keys.append(draw.key)
            positions.append(position)
        return DrawRows(temperatures, keys, positions)

    def needs_history(self, sequences: Sequence[WorkerSequence]) -> bool:
        """Whether what one of these may draw, or how likely, depends on the tokens that it has had."""
        return bool(self._with_history) and not self._with_history.isdisjoint(sequence.id for sequence in sequences)

    def rows(self, sequences: Sequence[WorkerSequence], masks: Masks | None = None) -> SampledRows:
        """What a step needs to sample these. `needs` has BANNED for those that may not end yet, too."""
        slots = np.array([self._slots[sequence.id] for sequence in sequences], dtype=np.int64)
        positions = np.array([sequence.position for sequence in sequences], dtype=np.int64)
        params = self._params[slots]
        params["needs"][positions < params["min_tokens"]] |= BANNED
        rows = SampledRows(slots, positions, params)
        return rows if masks is None else rows.masked(masks)

    def record(self, rows: SampledRows, tokens_S: np.ndarray) -> None:
        """Count the tokens that these rows drew; a negative one is none."""
        counted = np.flatnonzero((rows.params["needs"] & PENALIZED != 0) & (tokens_S >= 0))
        if len(counted):
            self.counts.append(rows.params["counts_row"][counted], tokens_S[counted])


def _needs(params: SamplingParams, lists: TokenLists, vocab_size: int) -> int:
    penalties = (params.repetition_penalty - 1.0, params.presence_penalty, params.frequency_penalty)
    needs = 0
    if params.temperature == 0.0 or params.top_k == 1:
        needs |= GREEDY
    elif 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
        needs |= MASKED
    if params.allowed_token_ids:
        needs |= ALLOWED
    if len(lists.banned) or lists.bad_words:
        needs |= BANNED
    if len(lists.bias_ids):
        needs |= BIASED
    if any(penalties):
        needs |= PENALIZED
    return needs


def _token_lists(sequence: WorkerSequence, vocab_size: int) -> TokenLists:
    params = sequence.params

    def ids(values: Sequence[int]) -> np.ndarray:
        array = np.array(values, dtype=np.int64)
        return array[(array >= 0) & (array < vocab_size)]

    bias = [(token, value) for token, value in (params.logit_bias or {}).items() if 0 <= token < vocab_size]
    return TokenLists(
        sequence=sequence,
        allowed=ids(params.allowed_token_ids or ()),
        bias_ids=ids([token for token, _ in bias]),
        bias_values=np.array([value for _, value in bias], dtype=np.float32),
        banned=ids([word[0] for word in params.bad_words_token_ids if len(word) == 1]),
        ends=ids([*params.eos_token_ids, *(params.stop_token_ids or ())]),
        bad_words=tuple(word for word in params.bad_words_token_ids if len(word) > 1 and word[-1] < vocab_size),
    )
