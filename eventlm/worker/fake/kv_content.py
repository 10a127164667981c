"""What the KV blocks of a fake worker hold.

What a model keeps of a token depends on all tokens before it. So a block stands for the tokens whose rows were computed
into it and, by a chained hash, for those before its first one; a row may read none but blocks that stand for its own
context. The fake worker's tokens do not depend on blocks: a number that two sequences write to, or a prefix hit on what
is no longer there, would go unseen without this.

A row that continues where its sequence's last one ended does not check the earlier blocks again: a write to a block
marks all other sequences that hold it to be checked.
"""

from __future__ import annotations

from collections.abc import Sequence

from eventlm.events import Launched
from eventlm.types import SequenceId, ceil_div
from eventlm.worker.sequence_table import DesyncError, Row, WorkerSequence


class _Block:
    """token_ids: of the leading slots, as last written. context: hash of the tokens before them. writer: who
    wrote the first of them; readers: those that have the block in their tables.
    """

    __slots__ = ("context", "number", "readers", "token_ids", "writer")

    def __init__(self, number: int) -> None:
        self.number = number
        self.context = 0
        self.token_ids: list[int] = []
        self.writer: SequenceId | None = None
        self.readers: list[_Reader] = []


class _Reader:
    """A sequence. blocks: its table; hashes: for each leading block, that of the tokens before it; num_known: leading
    tokens which its blocks are known to hold.
    """

    __slots__ = ("blocks", "hashes", "num_known")

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.hashes = [0]
        self.num_known = 0


class KvContent:
    """Blocks of `block_size` tokens. `compute` and `accept` raise DesyncError, which quotes no tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: Those that have been in a table.
        self._blocks: dict[int, _Block] = {}
        self._readers: dict[SequenceId, _Reader] = {}
        #: Whether a row of this step has written to what another sequence reads.
        self._is_disturbed = False

    def compute(self, launch: Launched, rows: Sequence[Row]) -> None:
        """Compute the rows of a launch: all of them write, then each reads its context.

        As in a model, whose layers write what they keep of all rows before they attend to it.
        """
        for request, index in launch.forget:
            self._forget(SequenceId(request, index))
        for number, position, numbers in launch.blocks:
            self._take(rows[number].sequence.id, position, numbers)
        size, readers = self._block_size, self._readers
        unknown = []
        self._is_disturbed = False
        for row in rows:
            sequence, start = row.sequence, row.start
            reader = readers[sequence.id]
            if row.num_tokens == 1 and reader.num_known == start and (slot := start % size):
                block = reader.blocks[start // size]
                # Most rows go on in a block of their own.
                if len(block.token_ids) == slot and len(block.readers) == 1:
                    block.token_ids.append(sequence.token_ids[start])
                    reader.num_known = start + 1
                    continue
            self._write(sequence, start, start + row.num_tokens)
            unknown.append(row)
        for row in rows if self._is_disturbed else unknown:
            if readers[row.sequence.id].num_known < row.start + row.num_tokens:
                self._check(row.sequence, row.start + row.num_tokens)

    def accept(self, rows: Sequence[Row], tokens: Sequence[list[int]]) -> None:
        """Once their sequences have the tokens that rows gave: of several, all but the last were computed as drafts."""
        for row, given in zip(rows, tokens, strict=True):
            if len(given) > 1:
                end = row.start + row.num_tokens
                self._write(row.sequence, end, end + len(given) - 1)

    def _forget(self, identity: SequenceId) -> None:
        reader = self._readers.pop(identity, _Reader())
        for block in reader.blocks:
            block.readers.remove(reader)

    def _take(self, identity: SequenceId, position: int, numbers: list[int]) -> None:
        """Write blocks to a sequence's table."""
        reader = self._readers.setdefault(identity, _Reader())
        replaced = slice(position, position + len(numbers))
        for block in reader.blocks[replaced]:
            block.readers.remove(reader)
        reader.num_known = min(reader.num_known, position * self._block_size)
        taken = [self._blocks.setdefault(number, _Block(number)) for number in numbers]
        for block in taken:
            if reader in block.readers:
                raise DesyncError(f"sequence {_name(identity)}: block {block.number} is twice in its table")
            block.readers.append(reader)
        reader.blocks[replaced] = taken

    def _write(self, sequence: WorkerSequence, start: int, end: int) -> None:
        """Compute tokens of a sequence into its blocks."""
        reader, size = self._readers[sequence.id], self._block_size
        if end > len(reader.blocks) * size:
            raise DesyncError(f"sequence {_name(sequence.id)}: no block for token {len(reader.blocks) * size}")
        for index in range(start // size, ceil_div(end, size)):
            block, first = reader.blocks[index], index * size
            slot = max(start - first, 0)
            new = sequence.token_ids[first + slot : min(first + size, end)]
            context = self._hash_before(sequence, reader, index)
            if block.context == context and block.token_ids[slot : slot + len(new)] == new:
                continue
            for other in block.readers:
                if other is not reader:
                    other.num_known = 0
                    self._is_disturbed = True
            if not slot:
                block.context, block.writer = context, sequence.id
            # What followed has lost its context. Where slots before are empty or not its own, the check finds that.
            block.token_ids[slot:] = new
        if start <= reader.num_known < end:
            reader.num_known = end

    def _check(self, sequence: WorkerSequence, end: int) -> None:
        """Raise DesyncError unless its blocks hold its first `end` tokens."""
        reader, size = self._readers[sequence.id], self._block_size
        for index in range(reader.num_known // size, ceil_div(end, size)):
            block, first = reader.blocks[index], index * size
            own = sequence.token_ids[first : min(first + size, end)]
            held = block.token_ids[: len(own)]
            if block.context == self._hash_before(sequence, reader, index):
                if held == own:
                    continue
                first += _num_equal(held, own)
            since = f"what it holds began with {_name(block.writer)}" if block.writer else "nothing was written to it"
            raise DesyncError(
                f"sequence {_name(sequence.id)}: block {block.number} does not hold its context at token {first}; "
                f"{since}"
            )
        reader.num_known = end

    def _hash_before(self, sequence: WorkerSequence, reader: _Reader, index: int) -> int:
        """Of the tokens before the block at `index` of its table."""
        hashes, size = reader.hashes, self._block_size
        for first in range((len(hashes) - 1) * size, index * size, size):
            hashes.append(hash((hashes[-1], *sequence.token_ids[first : first + size])))
        return hashes[index]


def _num_equal(held: list[int], own: list[int]) -> int:
    """How many of the leading tokens are the same."""
    return next((slot for slot, pair in enumerate(zip(held, own, strict=False)) if pair[0] != pair[1]), len(held))


def _name(identity: SequenceId) -> str:
    return f"{identity.request}/{identity.index}"
