"""One replica: its resident sequences, its steps in flight, and what its worker must forget.

Residents hold blocks and a slot. `running` is kept in order of the urgency each had at its admission, so that a step
is formed without sorting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from eventlm.config import CoreConfig
from eventlm.core.state.backend_state import BackendCapacity
from eventlm.core.state.block_pool import ROOT, BlockPool, Node
from eventlm.core.state.kv_groups import allocate
from eventlm.core.state.prefix_index import Holder, PrefixIndex
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.state.state_pool import StatePool
from eventlm.core.state.turns import Tally
from eventlm.core.state.waiting_queue import WaitingQueue
from eventlm.types import NANOSECONDS_PER_MILLISECOND, SequenceId

_urgency = attrgetter("urgency")


class ChunkRow(NamedTuple):
    """A prefill chunk in flight: the tokens from `start` to before `end`. `final` is the last of its prefill."""

    sequence: Sequence
    start: int
    end: int
    final: bool


class StepInFlight(Struct, frozen=True, eq=False):
    """A launched step. Rows are `decodes`, then `chunks`; `most` has one entry a row."""

    step: int
    launch_seq: int
    decodes: list[Sequence]
    chunks: list[ChunkRow]
    most: list[int]
    predicted_ns: int

    def is_long(self, config: CoreConfig) -> bool:
        """Whether it is predicted to take so long that no step is planned after it, if every stage has one."""
        return 0 < config.run_ahead_ms * NANOSECONDS_PER_MILLISECOND <= self.predicted_ns


class Replica:
    """State of one replica. `queue` holds the sequences that a router sent here. config: that of its set, whose number
    `replicaset` is. tally: the set's, to which it tells its changes. prefixes: the set's index, where it has the bit
    `position`. states: of a model with recurrent layers, which can go on after a cached block only if a copy of
    the state hangs on it. capacity: of another server, which has no steps; whose pool stands for what its cache holds.
    """

    __slots__ = (
        "_awaiting",
        "_reads_prefixes",
        "_tally",
        "admitted_tokens",
        "awaited",
        "capacity",
        "config",
        "epoch",
        "forget",
        "in_flight",
        "index",
        "next_step",
        "num_partial",
        "pool",
        "queue",
        "replicaset",
        "running",
        "states",
        "up",
    )

    def __init__(
        self,
        index: int,
        config: CoreConfig,
        *,
        replicaset: int,
        tally: Tally,
        states: StatePool | None = None,
        prefixes: PrefixIndex | None = None,
        position: int = 0,
        reads_prefixes: bool = False,
        capacity: BackendCapacity | None = None,
    ) -> None:
        self.index = index
        self.capacity = capacity
        self.config = config
        self.replicaset = replicaset
        self.up = False
        self.epoch = 0
        self.next_step = 0
        self.states = states
        self._tally = tally
        holder = None if prefixes is None else Holder(prefixes.held, position)
        self.pool = BlockPool(config.num_blocks, states, holder, num_groups=config.groups)
        self.queue = WaitingQueue()
        #: With `reads_prefixes`: how many of those that wait here or are half done have a block of each name.
        self.awaited: dict[int, int] = {}
        self._reads_prefixes = reads_prefixes
        self._awaiting = None if prefixes is None else Holder(prefixes.awaited, position)
        self.running: list[Sequence] = []
        self.num_partial = 0
        self.in_flight: deque[StepInFlight] = deque()
        self.forget: list[tuple[int, int]] = []
        #: Tokens that the residents had when they were admitted.
        self.admitted_tokens = 0

    @property
    def worker(self) -> int | None:
        """Epoch of the worker that is up, None if there is none.

        What came from, or goes to, a worker of any other epoch means nothing: that worker is gone, with its cache and
        all that it had in flight.
        """
        return self.epoch if self.up else None

    def start_worker(self, epoch: int) -> None:
        """A worker is up; there was none."""
        self.up = True
        self.epoch = epoch
        self._tally.note_worker(self.index, up=True)

    def launch(self, step: StepInFlight) -> None:
        """A step is in flight."""
        self.in_flight.append(step)
        self.next_step += 1
        self._tally.note_steps(self.index)

    def complete(self) -> StepInFlight:
        """The oldest step in flight is done."""
        self._tally.note_steps(self.index)
        return self.in_flight.popleft()

    def line_up(self, sequence: Sequence, key: int) -> None:
        """Put a sequence in the replica's own line."""
        self.queue.add(sequence, key)
        self.await_names(sequence.block_names)
        self._tally.note(self.index)

    def leave_line(self, sequence: Sequence) -> None:
        """Take one out of it."""
        self.queue.remove(sequence)
        self.await_no_more(sequence.block_names)
        self._tally.note(self.index)

    def await_names(self, names: list[int]) -> None:
        """Blocks of these names will be computed here."""
        if not self._reads_prefixes:
            return
        awaited = self.awaited
        for name in names:
            awaited[name] = awaited.get(name, 0) + 1
        if self._awaiting is not None:
            self._awaiting.add(names)

    def await_no_more(self, names: list[int]) -> None:
        """One sequence less waits or is half done that has blocks of these names."""
        if not self._reads_prefixes:
            return
        awaited, gone = self.awaited, []
        for name in names:
            count = awaited.pop(name) - 1
            if count:
                awaited[name] = count
            else:
                gone.append(name)
        if self._awaiting is not None:
            self._awaiting.drop(gone)

    def has_room(self) -> bool:
        """Whether another step may be in flight here, or another request if it is another server."""
        if self.capacity is not None:
            return self.num_sent < self.capacity.limit
        config, num_steps = self.config, len(self.in_flight)
        if num_steps >= config.steps_in_flight:
            return False
        # While a stage has no step, waiting would leave it idle.
        return num_steps < config.stages or not self.in_flight[-1].is_long(config)

    @property
    def num_sent(self) -> int:
        """Requests that another server has."""
        assert self.capacity is not None
        return len(self.running) + self.capacity.num_hedges

    def weigh(self, num_tokens: int) -> int:
        """So many tokens as a load: less for a server that is to have a larger share."""
        return num_tokens if self.capacity is None else num_tokens * 1_000_000 // self.capacity.weight_ppm

    def stop_worker(self) -> None:
        """Another server gets no further requests. What it has goes on."""
        self.up = False
        self._tally.note_worker(self.index, up=False)

    def note_capacity(self) -> None:
        """How much another server may have has changed."""
        self._tally.note_steps(self.index)

    def first_group(self, sequence: Sequence) -> int:
        """The KV group in which a resident begins."""
        return self.pool.group_of(sequence.block_table[0])

    def settle(self, sequence: Sequence, hits: list[int], first_group: int, num_lacking: int = 0) -> None:
        """Make a waiting sequence resident on the blocks it hits and as many new ones as it needs. The first of all is
        of the KV group `first_group`. Another server takes it although its pool lacks blocks.

        The caller has checked that the blocks are available. Of recurrent layers it computes the state from the last
        copy on, and with it those of the blocks it hits that follow: the same keys and values are stored there again.
        """
        block_size = self.config.block_size
        self.pool.hold(hits)
        num_blocks = sequence.blocks_to_admit(block_size) - num_lacking
        sequence.block_table = hits + allocate(self.config, self.pool, first_group, len(hits), num_blocks)
        sequence.note_room(block_size)
        sequence.num_tree_blocks = len(hits)
        sequence.shipped_blocks = 0
        sequence.transition(State.PREFILL)
        sequence.replica = self.index
        sequence.residency += 1
        sequence.prefill_tokens = sequence.num_tokens
        num_done = len(hits)
        if self.states is not None:
            names = sequence.block_names
            num_done = self.states.find_deepest(names, 0, num_done)
            self.states.settle(sequence.id, names[num_done - 1] if num_done else None)
        sequence.launched_tokens = num_done * block_size
        sequence.skips = 0
        sequence.paths.clear()
        index = bisect_left(self.running, sequence.urgency, key=_urgency)
        self.running.insert(index, sequence)
        self.await_names(sequence.block_names)
        self.num_partial += 1
        self._tally.num_running += 1
        self._tally.note(self.index)
        self.admitted_tokens += sequence.prefill_tokens

    def restore_residents(self, residents: list[Sequence]) -> None:
        """Have these residents, which hold their blocks already. For a replica that has none."""
        self.running = sorted(residents, key=_urgency)
        self.num_partial = sum(sequence.state is State.PREFILL for sequence in residents)
        self.admitted_tokens = sum(sequence.prefill_tokens for sequence in residents)
        self._tally.num_running += len(residents)
        self._tally.note(self.index)
        for sequence in residents:
            sequence.note_room(self.config.block_size)
            if sequence.state is State.PREFILL:
                self.await_names(sequence.block_names)

    def vacate(self, sequence: Sequence) -> None:
        """Take a resident's blocks and slot. The next launch lists it among those that the worker must forget."""
        index = bisect_left(self.running, sequence.urgency, key=_urgency)
        del self.running[index]
        if sequence.state is State.PREFILL:
            self.num_partial -= 1
            self.await_no_more(sequence.block_names)
        self._tally.num_running -= 1
        self._tally.note(self.index)
        self.admitted_tokens -= sequence.prefill_tokens
        self.pool.release_all(sequence.block_table)
        if self.states is not None:
            self.states.leave(sequence.id)
        if self.capacity is None:
            self.forget.append(sequence.id)
        sequence.block_table = []
        sequence.num_tree_blocks = 0
        sequence.launched_tokens = 0
        sequence.view.done_tokens = 0
        sequence.view.cached_tokens = 0

    def exchange_hits(self, sequence: Sequence, block_size: int) -> None:
        """Swap reserved blocks whose content has become hittable for those that hold it; skip past them.

        Not if they begin in another KV group: what has been launched lies elsewhere. Of recurrent layers: as far as
        there is a copy of the state.
        """
        names, index = sequence.block_names, sequence.num_tree_blocks
        first, last = sequence.launched_tokens // block_size, sequence.max_hit_blocks(block_size)
        if sequence.arrival.scheduling.skip_cache_read or index < first:
            return
        while index < last:
            node = self.pool.tree.get(names[index])
            if node is None or node[1] != (names[index - 1] if index else ROOT):
                break
            block = node[0]
            if self.pool.group_of(block) != self.pool.group_of(sequence.block_table[index]):
                break
            self.pool.hold([block])
            self.pool.release([sequence.block_table[index]])
            sequence.block_table[index] = block
            sequence.shipped_blocks = min(sequence.shipped_blocks, index)
            index += 1
            sequence.num_tree_blocks = index
        if self.states is not None:
            index = self.states.find_deepest(names, first, index)
            if index == first or not self.states.restart(sequence.id, names[index - 1]):
                return
        sequence.launched_tokens = max(sequence.launched_tokens, index * block_size)

    def find_hits(self, sequence: Sequence, block_size: int) -> list[Node]:
        """The cached blocks that a waiting sequence would hit here now. It keeps the list for the next call."""
        path = sequence.paths.get(self.index)
        if path is None:
            path = sequence.paths[self.index] = []
        if not sequence.arrival.scheduling.skip_cache_read:
            self.pool.follow(sequence.block_names, sequence.max_hit_blocks(block_size), path)
        return path

    def hit_tokens(self, sequence: Sequence, block_size: int) -> int:
        """Leading tokens of a waiting sequence that it need not compute here now."""
        num_blocks = len(self.find_hits(sequence, block_size))
        if self.states is not None:
            num_blocks = self.states.find_deepest(sequence.block_names, 0, num_blocks)
        return num_blocks * block_size

    def publish(self, sequence: Sequence, num_blocks: int) -> None:
        """Make the content of the first `num_blocks` blocks hittable, as far as they continue the tree's path."""
        names, index = sequence.block_names, sequence.num_tree_blocks
        if index < num_blocks:
            parent = names[index - 1] if index else ROOT
            blocks = sequence.block_table[index:num_blocks]
            sequence.num_tree_blocks += self.pool.insert(names[index:num_blocks], parent, blocks)

    def prefix_tokens(self, sequence: Sequence, block_size: int) -> int:
        """Leading tokens of a sequence that are hittable here, or will be by what was sent here before and waits or is
        half done.

        A name stands for all blocks before it, so sequences that share a block share those too.
        """
        if sequence.arrival.scheduling.skip_cache_read:
            return 0
        names, last = sequence.block_names, sequence.max_hit_blocks(block_size)
        index = self.hit_tokens(sequence, block_size) // block_size
        while index < last and names[index] in self.awaited:
            index += 1
        return index * block_size

    def partials(self) -> list[Sequence]:
        """Residents whose prefill is not launched to its end, most urgent at admission first."""
        if not self.num_partial:
            return []
        return [sequence for sequence in self.running if sequence.state is State.PREFILL]

    def finish_prefill(self, sequence: Sequence) -> None:
        """The last chunk is launched."""
        sequence.transition(State.DECODE)
        self.num_partial -= 1
        self.await_no_more(sequence.block_names)

    def summary(self) -> str:
        """What a digest must see of it beside its blocks and sequences."""
        steps = [(step.step, step.launch_seq, step.predicted_ns) for step in self.in_flight]
        forget = [(request, index) for request, index in self.forget]
        return f"{self.up} {self.epoch} {self.next_step} {self.admitted_tokens} {steps} {forget}"

    def lose_worker(self) -> list[Sequence]:
        """The worker is gone with its cache and its steps. Returns all whose rows were in flight, each once."""
        self.up = False
        self._tally.note_worker(self.index, up=False)
        dropped: dict[SequenceId, Sequence] = {}
        for step in self.in_flight:
            for sequence in step.decodes:
                dropped[sequence.id] = sequence
            for row in step.chunks:
                dropped[row.sequence.id] = row.sequence
        self.in_flight.clear()
        return list(dropped.values())

    def start_anew(self) -> None:
        """After everything resident has vacated: an empty cache and a worker that knows nothing."""
        self.pool.reset()
        if self.states is not None:
            self.states.reset()
        self.forget.clear()
