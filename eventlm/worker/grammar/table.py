"""The grammars of the sequences that a worker holds, and their masks, computed beside the model's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from eventlm.grammars import GrammarError
from eventlm.types import SequenceId, WorkerEnd
from eventlm.worker.grammar.compiler import GrammarCompiler
from eventlm.worker.grammar.sequence_grammar import SequenceGrammar
from eventlm.worker.sampling.vocabulary_masks import Masks, mask_bytes, unpack_mask
from eventlm.worker.sequence_table import WorkerSequence


class GrammarTable:
    """Sequences with a grammar. Masks are computed in `num_threads` threads."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, *, num_threads: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._grammars: dict[SequenceId, SequenceGrammar] = {}

    def __len__(self) -> int:
        return len(self._grammars)

    def add(self, sequence: WorkerSequence) -> None:
        """Take in a sequence that has a grammar, with whatever output it brings. Waits until its matcher is built."""
        try:
            matcher = self._compiler.matcher(sequence.params.grammar)
        except GrammarError:
            # Its request has failed by now, unless it could be built before: then its first token ends it.
            matcher = None
        self._grammars[sequence.id] = SequenceGrammar(sequence, matcher, self._vocab_size)

    def remove(self, identity: SequenceId) -> None:
        """Forget a sequence, if it has a grammar."""
        self._grammars.pop(identity, None)

    def start(self, sequences: Sequence[WorkerSequence]) -> Future[Masks] | None:
        """Begin with the masks of those that have a grammar among the sampled sequences; None if none has."""
        if not self._grammars:
            return None
        found = [(number, self._grammars.get(sequence.id)) for number, sequence in enumerate(sequences)]
        rows = [(number, grammar) for number, grammar in found if grammar is not None]
        return self._thread.submit(self._masks, rows) if rows else None

    def has(self, identity: SequenceId) -> bool:
        """Whether it has a grammar."""
        return identity in self._grammars

    def end_of(self, sequence: WorkerSequence, token_id: int, next_id: int, position: int) -> WorkerEnd | None:
        """Go on with `next_id` at this position of the output; the end that the drawn `token_id` is. For sequences that
        have a grammar.
        """
        grammar = self[sequence]
        if token_id == next_id:
            return grammar.advance(token_id, position)
        end = grammar.copy().advance(token_id, position)
        grammar.advance(next_id, position)
        return end

    def __getitem__(self, sequence: WorkerSequence) -> SequenceGrammar:
        return self._grammars[sequence.id]

    def mask(self, grammar: SequenceGrammar) -> np.ndarray:
        """Of one alone: booleans [vocab_size]."""
        return unpack_mask(self._masks([(0, grammar)]).bits[0], self._vocab_size)

    def _masks(self, rows: list[tuple[int, SequenceGrammar]]) -> Masks:
        # One more bit than tokens.
        written = allocate_token_bitmask(len(rows), self._vocab_size + 1)
        open_rows = [
            (grammar.matcher, index)
            for index, (_, grammar) in enumerate(rows)
            if grammar.over is None and grammar.matcher is not None
        ]
        if open_rows:
            fill_next_token_bitmask_par(self._executor, open_rows, written)
        bits = np.empty((len(rows), mask_bytes(self._vocab_size)), dtype=np.uint8)
        for index, (_, grammar) in enumerate(rows):
            bits[index] = grammar.narrow(written[index].view(np.uint8))
        return Masks(np.array([number for number, _ in rows]), bits)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="masks")

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._num_threads)
