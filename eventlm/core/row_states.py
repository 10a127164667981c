"""States of recurrent layers in the rows of a step: where they start from, and where copies of them are kept.

A prompt leaves a copy at its last whole block, where the next turn of a chat goes on; where it parts from what the tree
already had, since others may part there too; and every `state_interval` tokens, as a decode does.
"""

from __future__ import annotations

from msgspec import UNSET

from eventlm.config import CoreConfig
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence
from eventlm.core.state.state_pool import StatePool
from eventlm.core.state.step_plan import StepPlan


def whole_blocks(sequence: Sequence, num_tokens: int, max_tokens: int, block_size: int) -> int:
    """Tokens of a chunk of about `num_tokens`, at most `max_tokens`, that does not end inside a block of the tree:
    others may hold it, and a worker clears what follows the last token of a row in its block. 0: it has to wait.
    """
    end = sequence.launched_tokens + num_tokens
    if not num_tokens or not end % block_size or end > sequence.num_tree_blocks * block_size:
        return num_tokens
    whole = num_tokens - end % block_size
    if whole <= 0:
        whole += block_size
    return whole if whole <= max_tokens else 0


def keep_chunk_states(
    config: CoreConfig, replica: Replica, plan: StepPlan, sequence: Sequence, start: int, parts_at: int
) -> None:
    """The state of a chunk that begins at token `start`, whose row comes next. Its blocks are in the tree, and
    `parts_at` of the sequence's were before.
    """
    states, size, names = replica.states, config.block_size, sequence.block_names
    assert states is not None
    end = sequence.launched_tokens
    # The same prompt cannot hit its own last token, a longer one can.
    wanted = {parts_at, (sequence.prefill_tokens - 1) // size, sequence.prefill_tokens // size}
    if config.state_interval is not UNSET:
        interval = config.state_interval
        wanted |= {position // size for position in range(start - start % interval + interval, end + 1, interval)}
    fits = [
        n for n in sorted(wanted) if start < n * size <= end and n <= len(names) and names[n - 1] in replica.pool.tree
    ]
    began = states.start_row(sequence.id)
    kept = states.keep([names[n - 1] for n in fits])
    copies = [(n * size, kept[names[n - 1]]) for n in fits if names[n - 1] in kept]
    if began.is_new or began.source != began.slot or copies:
        row = len(plan.decodes) + len(plan.chunks)
        plan.states.append((row, began.slot, began.source, copies))


def keep_decode_states(config: CoreConfig, states: StatePool, plan: StepPlan) -> None:
    """Copies that the decodes of a plan keep. Their blocks get their names when the step has completed."""
    if config.state_interval is UNSET:
        return
    for row, sequence in enumerate(plan.decoding):
        # What the row adds to the state is the last token before the one that it produces.
        position = sequence.num_tokens + sequence.pending_tokens - 1
        if position % config.state_interval == 0:
            promised = states.promise(sequence.id, position // config.block_size)
            if promised is not None:
                own, copy = promised
                plan.states.append((row, own, own, [(position, copy)]))
