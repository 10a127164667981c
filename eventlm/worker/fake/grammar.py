"""The fake worker's way through a grammar: hashes choose among the bytes that may follow, and often one that closes.

As everywhere in the fake worker a token depends on its request, index and position alone, and here on those before it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from eventlm.types import WorkerEnd
from eventlm.worker.fake.tokens import draw, fake_token
from eventlm.worker.grammar.compiler import GrammarCompiler
from eventlm.worker.grammar.sequence_grammar import SequenceGrammar
from eventlm.worker.grammar.table import GrammarTable
from eventlm.worker.grammar.vocabulary import FAKE_SPECIAL_TOKENS, NUM_BYTES, fake_vocabulary
from eventlm.worker.sequence_table import Row, WorkerSequence

_VOCAB_SIZE = NUM_BYTES + len(FAKE_SPECIAL_TOKENS)
#: One in so many tokens ends or closes something if it can.
_CLOSING = 3
_CLOSERS = tuple(b'"}]')
#: Bytes that are chosen where no printable one may follow.
_BLANKS = frozenset(b" \t\r\n")


@cache
def fake_compiler() -> GrammarCompiler:
    """One for all fake runners of a process."""
    return GrammarCompiler(fake_vocabulary)


class FakeGrammars:
    """The grammars of a fake runner's sequences."""

    def __init__(self) -> None:
        self._table = GrammarTable(fake_compiler(), _VOCAB_SIZE, num_threads=1)
        self.add = self._table.add
        self.remove = self._table.remove

    def produce(self, row: Row, count: int, forced: list[int] | None) -> tuple[list[int], WorkerEnd | None]:
        """Up to `count` tokens of a sequence with a grammar, cut after its end. It goes on with `forced`, if given."""
        sequence = row.sequence
        grammar = self._table[sequence]
        drawing = grammar if forced is None else grammar.copy()
        produced: list[int] = []
        end = None
        while len(produced) < count and end is None:
            index = sequence.position + len(produced)
            produced.append(self._choose(sequence, drawing, index))
            end = drawing.advance(produced[-1], index)
        for index, token_id in enumerate(forced or [], start=sequence.position):
            self._table.mask(grammar)
            grammar.advance(token_id, index)
        return produced, end

    def _choose(self, sequence: WorkerSequence, grammar: SequenceGrammar, index: int) -> int:
        params = sequence.params
        may = set(np.flatnonzero(self._table.mask(grammar)).tolist())
        ends = sorted(may & {*params.eos_token_ids, *(params.stop_token_ids or ())})
        others = sorted(may.difference(ends))
        drawn = draw("grammar", params.noise_seed, sequence.id.index, index)
        if ends and (not others or (index >= params.min_tokens and drawn % _CLOSING == 0)):
            return ends[0]
        if drawn % _CLOSING == 0 and (closers := [byte for byte in _CLOSERS if byte in may]):
            return closers[0]
        word = fake_token(params.noise_seed, sequence.id.index, index)
        if word in may:
            return word
        shown = [token_id for token_id in others if token_id < 0x7F and token_id not in _BLANKS] or others
        return shown[(drawn >> 16) % len(shown)]
