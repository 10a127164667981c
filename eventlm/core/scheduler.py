"""The scheduler: after each drain it plans steps until every replica has as many in flight as it may have, or no
sequence can run.

In a pipeline each step takes its share of the decodes alone, so that there is one for every stage.

Order within a step: evictions for the head of the queue; decodes, most urgent first; then the more urgent of the
waiting head and the head of the partial prefills. A row is never taken back. Every sequence that is passed over because
it does not fit remembers how often that happened; one that was passed over `max_skips` times blocks the line until it
fits. Before all that, a suspect (see `eventlm.core.poison_requests`) gets a step for itself.
"""

from __future__ import annotations

from heapq import heapify, heappop

from eventlm.config import CoreConfig
from eventlm.core.admission import Fit, admit, measure, note_progress
from eventlm.core.forwarding import forward_next
from eventlm.core.graph_buckets import bucket_of
from eventlm.core.plugin_calls import ask_batcher, ask_margin, ask_policy
from eventlm.core.poison_requests import find_trial, is_held_back, is_suspect
from eventlm.core.preemption import evict_for, make_room
from eventlm.core.routing import route_new
from eventlm.core.row_states import keep_chunk_states, keep_decode_states, whole_blocks
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.kv_groups import group_at, left_in_shard, shares_of
from eventlm.core.state.plan_witness import (
    CandidateSeen,
    CandidateVerdict,
    ChunkAsked,
    DecodeShort,
    DecodeVerdict,
    PlanEnded,
    TurnTaken,
)
from eventlm.core.state.replica import ChunkRow, Replica, StepInFlight
from eventlm.core.state.replicaset import Replicaset
from eventlm.core.state.sequence import Sequence, State, Urgency
from eventlm.core.state.step_plan import StepPlan
from eventlm.core.state.waiting_queue import Candidate
from eventlm.events import Launched, Preempted
from eventlm.types import ceil_div


def plan(state: CoreState) -> None:
    """Rounds of one step a replica, fewest admitted tokens first, until all have their steps or no sequence can run; in
    each set that a fact of the drain is about.
    """
    state.plans = {}
    if state.paused:
        state.due.clear()
        return
    for replicaset in state.replicasets:
        # Others' facts must not decide when a set is planned.
        if len(state.replicasets) == 1 or replicaset.index in state.due:
            _plan_set(state, replicaset)
    state.due.clear()


def _plan_set(state: CoreState, replicaset: Replicaset) -> None:
    route_new(state, replicaset)
    replicaset.margin = ask_margin(state, replicaset) if replicaset.num_waiting else None
    if replicaset.forwards is not None:
        plan_one = forward_next
    else:
        plan_one = plan_step if state.witness is None else _plan_witnessed
    # What a witness sees shall not depend on when a core was restored, which does not know who was asked before.
    every = state.witness is not None
    while replicaset.begin_round(every=every):
        if not replicaset.policy.static:
            _read_keys(state, replicaset)
        num_decided = len(state.decisions)
        launched = [plan_one(state, replica) for replica in replicaset.replicas_in_turn(every=every)]
        # A sequence preempted on one replica may run on another, whose turn was over by then.
        if not any(launched) and not _has_preempted(state, num_decided):
            return


def _has_preempted(state: CoreState, num_before: int) -> bool:
    """Whether a sequence was preempted since so many decisions. Without a launch that ends: only decodes give way to
    memory, and an eviction at admission counts against its victim until its next token.
    """
    return any(isinstance(decision, Preempted) for decision in state.decisions[num_before:])


def _read_keys(state: CoreState, replicaset: Replicaset) -> None:
    """One call of a policy that is not static, over all that wait and all partial prefills, where there is room for a
    step: on the replicas `standing`, and in the shared queue.
    """
    replicas = replicaset.standing
    queues = [replicaset.shared_queue, *(replica.queue for replica in replicas)]
    waiting = [sequence for queue in queues for sequence in queue.members]
    if replicaset.policy.reads_prefixes:
        _read_prefixes(replicaset, waiting)
    partials = [sequence for replica in replicas for sequence in replica.partials()]
    views = [sequence.view for sequence in waiting + partials]
    keys, replicaset.round_generation = ask_policy(state, replicaset, views)
    index = 0
    for queue in queues:
        queue.order_by(keys[index : index + len(queue)])
        index += len(queue)
    replicaset.partial_keys = {sequence.id: key for sequence, key in zip(partials, keys[index:], strict=True)}


def _read_prefixes(replicaset: Replicaset, waiting: list[Sequence]) -> None:
    """What each waiting sequence could hit now: at home, or the most that any replica has."""
    block_size = replicaset.config.block_size
    for sequence in waiting:
        if sequence.home < 0:
            sequence.view.cached_tokens = replicaset.best_hit_tokens(sequence)
        else:
            home = replicaset.replicas[sequence.home - replicaset.first]
            sequence.view.cached_tokens = home.hit_tokens(sequence, block_size)


def plan_step(state: CoreState, replica: Replica) -> bool:
    """Form and launch a step; False if there is nothing to run."""
    config, replicaset = replica.config, state.set_of(replica)
    plan = StepPlan(replica.index, state.now_ns, config.max_num_batched_tokens, config.groups)
    state.plans[replica.index] = state.latest_plans[replica.index] = plan
    head = None
    trial = find_trial(state, replica) if replicaset.suspects else None
    if trial is None:
        head = waiting_head(state, replica) if replicaset.num_waiting else None
        if head is not None and not is_held_back(state, head.sequence):
            evict_for(state, replica, head)
            # The head may be a suspect that did not fit before.
            trial = find_trial(state, replica)
    if trial is not None:
        plan.stop("trial", trial)
        if replica.in_flight:
            return False
        _add_trial(state, replica, plan, trial)
    else:
        residents = replica.running[:] if config.stages == 1 else _micro_batch(replica, plan, config.decode_batches)
        _add_decodes(state, replica, plan, residents)
        if replica.num_partial or head is not None:
            _add_prefills(state, replica, plan)
            replica.queue.end_plan()
            replicaset.shared_queue.end_plan()
    if replicaset.suspects and not plan.decodes and not plan.chunks and not replica.in_flight:
        trial = find_trial(state, replica, held_back=True)
        if trial is not None:
            plan.stop("trial", trial)
            _add_trial(state, replica, plan, trial)
    if not plan.decodes and not plan.chunks:
        return False
    _launch(state, replica, plan)
    return True


def _plan_witnessed(state: CoreState, replica: Replica) -> bool:
    """`plan_step`, with the beginning and the end of the turn noted."""
    assert state.witness is not None
    num_running, num_available = len(replica.running), replica.pool.num_available
    state.witness.append(
        TurnTaken(replica.index, replica.admitted_tokens, len(replica.in_flight), num_running, num_available)
    )
    is_launched = plan_step(state, replica)
    plan = state.plans[replica.index]
    num_decodes, num_chunks = len(plan.decodes), len(plan.chunks)
    load = plan.load
    state.witness.append(
        PlanEnded(
            replica.index,
            plan.step,
            num_decodes,
            num_chunks,
            load.decode_tokens,
            load.num_tokens,
            load.budget_tokens,
            plan.rest,
        )
    )
    return is_launched


def waiting_head(state: CoreState, replica: Replica) -> Candidate | None:
    """The most urgent of those that wait for a replica and have not been passed over in this plan."""
    own, shared = replica.queue.peek(), state.set_of(replica).shared_queue.peek()
    if own is None or (shared is not None and shared.urgency < own.urgency):
        return shared
    return own


def _add_trial(state: CoreState, replica: Replica, plan: StepPlan, sequence: Sequence) -> None:
    """The next row of a suspect, which waits and fits or is half done, and nothing else."""
    if sequence.state is State.DECODE:
        # It was lost in a decode behind others, whose tokens are not known.
        _add_decodes(state, replica, plan, [sequence])
        return
    if not sequence.resident:
        candidate, fit = state.set_of(sequence).queue_of(sequence).candidate(sequence), measure(replica, sequence)
        _note_candidate(state, replica, candidate, "admitted", fit)
        admit(state, replica, candidate, fit)
    else:
        _note_candidate(state, replica, Candidate(sequence.urgency, sequence), "partial")
    _add_chunk(state, replica, plan, sequence)


def _add_decodes(state: CoreState, replica: Replica, plan: StepPlan, residents: list[Sequence]) -> None:
    """One row for each of the residents that decodes and may run, most urgent first, as far as the token budget goes.

    This loop runs once for every sequence and step: it is written for speed.
    """
    config = replica.config
    max_in_flight = config.decodes_in_flight_per_seq
    per_row = config.max_tokens_per_row
    # Each of several groups has a budget, so what its rows leave is looked at row by row: nothing is to spare.
    budget = config.max_num_batched_tokens * config.groups
    reserved = budget if config.groups > 1 else 0
    spare = budget - reserved
    decoding, decodes, row_most = plan.decoding, plan.decodes, plan.most
    context_tokens = 0
    decode_state = State.DECODE
    for sequence in residents:
        if sequence.state is not decode_state or sequence.sampling_in_flight >= max_in_flight:
            continue
        ahead = sequence.num_tokens + sequence.pending_tokens
        most = per_row
        if ahead + most > sequence.room_tokens or most > spare:
            most = _fit_decode(state, replica, plan, sequence, spare + reserved)
            if not most:
                continue
        decodes.append((sequence.request, sequence.index, sequence.num_tokens, sequence.in_flight))
        decoding.append(sequence)
        row_most.append(most)
        sequence.in_flight += 1
        sequence.sampling_in_flight += 1
        sequence.pending_tokens += most
        spare -= most
        context_tokens += ahead
    load = plan.load
    load.decode_tokens = budget - reserved - spare
    load.num_decodes = len(decodes)
    load.context_tokens = context_tokens
    if replica.states is not None:
        keep_decode_states(config, replica.states, plan)


def _micro_batch(replica: Replica, plan: StepPlan, num_batches: int) -> list[Sequence]:
    """The most urgent of the decodes that may run, no more than an equal share of all. If one step took all, the other
    stages would have nothing to do until it has gone through them. None while as many steps as there are shares have
    decodes: one more would divide them into smaller steps, which would stay so.
    """
    ready = [s for s in replica.running if s.state is State.DECODE and not s.sampling_in_flight]
    num_taken = ceil_div(len(replica.running) - replica.num_partial, num_batches)
    if sum(1 for step in replica.in_flight if step.decodes) >= num_batches:
        num_taken = 0
    for sequence in ready[num_taken:]:
        plan.leave_out(sequence, "micro_batch")
    return ready[:num_taken]


def _fit_decode(state: CoreState, replica: Replica, plan: StepPlan, sequence: Sequence, budget: int) -> int:
    """Most tokens of a decode that is near its limit or lacks blocks, for which `budget` is less than a whole row, or
    that is of several KV groups; 0 if it has no row in this step.
    """
    config = replica.config
    ahead = sequence.num_tokens + sequence.pending_tokens
    shares = shares_of(config, replica.first_group(sequence), ahead - 1) if config.groups > 1 else None
    if budget <= 0 or (shares is not None and shares.room(plan.group_loads) <= 0):
        plan.leave_out(sequence, "token_budget")
        return 0
    most = min(sequence.max_total_tokens - ahead, config.max_tokens_per_row, budget)
    if most and ahead + most > sequence.room_tokens:
        most = _grow(state, replica, plan, sequence, most)
        if not most and not sequence.resident:
            plan.leave_out(sequence, "blocks", num_lacking=1)
    if most and shares is not None:
        shares.add_decode(plan.group_loads)
    return most


def _grow(state: CoreState, replica: Replica, plan: StepPlan, sequence: Sequence, most: int) -> int:
    """Blocks for a decode of up to `most` tokens; how many it may produce, 0 if it has no row in this step.

    Where the pool has too little it produces what its own blocks hold. Only one that could produce nothing takes a
    block from others, or goes; and it waits for its rows in flight first, which may need less than was reserved.
    """
    block_size = replica.config.block_size
    first = len(sequence.block_table)
    ahead = sequence.num_tokens + sequence.pending_tokens
    num_fresh = ceil_div(ahead + most - 1, block_size) - first
    # Of several groups, one row takes no more than one block.
    in_groups = replica.pool.num_groups > 1
    group = group_at(replica.config, replica.first_group(sequence), first) if in_groups else 0
    num_available = replica.pool.available_in(group)
    if num_available < num_fresh:
        most_now = first * block_size - ahead + 1
        if most_now > 0:
            _note_short(state, replica, sequence, num_fresh, num_available, "fewer_tokens")
            return most_now
        if sequence.sampling_in_flight:
            _note_short(state, replica, sequence, num_fresh, num_available, "rows_in_flight")
            return 0
        if not num_available and not make_room(state, replica, sequence, group):
            _note_short(state, replica, sequence, num_fresh, num_available, "preempted")
            return 0
        _note_short(state, replica, sequence, num_fresh, num_available, "block_taken")
        num_fresh = 1
        most = min(most, (first + 1) * block_size - ahead + 1)
    fresh = replica.pool.allocate(num_fresh, group)
    sequence.block_table += fresh
    sequence.note_room(block_size)
    sequence.shipped_blocks = len(sequence.block_table)
    plan.blocks.append((len(plan.decodes), first, fresh))
    return most


def _note_short(
    state: CoreState, replica: Replica, sequence: Sequence, num_blocks: int, num_available: int, verdict: DecodeVerdict
) -> None:
    if state.witness is not None:
        state.witness.append(DecodeShort(replica.index, sequence.id, num_blocks, num_available, verdict))


def _add_prefills(state: CoreState, replica: Replica, plan: StepPlan) -> None:
    """Chunks of partial prefills and of newly admitted sequences, more urgent ones first."""
    config = replica.config
    partials = _partial_heap(state, replica)
    passed: list[Sequence] = []
    # The one that closes the line: none that waits after it is looked at.
    last: Sequence | None = None
    most_chunks = config.max_num_seqs - len(plan.decodes)
    while not plan.is_full and len(plan.chunks) < most_chunks:
        head = None
        if last is None and len(replica.running) < config.max_residents:
            head = waiting_head(state, replica)
        if partials and (head is None or partials[0][0] < head.urgency):
            partial = Candidate(*heappop(partials))
            _note_candidate(state, replica, partial, "partial")
            _add_chunk(state, replica, plan, partial.sequence)
        elif head is None:
            break
        elif (fit := measure(replica, head.sequence)).num_lacking <= 0 and not (
            is_suspect(state, head.sequence) or _is_full_for(plan, config, fit)
        ):
            for skipped in passed:
                skipped.skips += 1
                state.touch(skipped)
                if last is None and skipped.skips >= config.max_skips:
                    last = skipped
            _note_candidate(state, replica, head, "admitted", fit)
            admit(state, replica, head, fit)
            _add_chunk(state, replica, plan, head.sequence)
        else:
            if fit.num_lacking > 0 and not is_held_back(state, head.sequence):
                plan.leave_out(head.sequence, "blocks", num_lacking=fit.num_lacking)
                _note_candidate(state, replica, head, "blocks", fit)
            elif not is_suspect(state, head.sequence):
                plan.leave_out(head.sequence, "token_budget")
                _note_candidate(state, replica, head, "token_budget", fit)
            else:
                plan.leave_out(head.sequence, "trial", other=head.sequence.id)
                _note_candidate(state, replica, head, "trial", fit)
            last = _pass_over(state, head.sequence, passed)
    if last is not None:
        plan.stop("head_of_line", last)
    elif len(replica.running) >= config.max_residents:
        plan.stop("sequence_limit")
    elif plan.is_full:
        plan.stop("token_budget")
    elif len(plan.chunks) >= most_chunks:
        plan.stop("micro_batch")
    for _, sequence in partials:
        plan.leave_out(sequence, "token_budget" if plan.is_full else "micro_batch")


def _is_full_for(plan: StepPlan, config: CoreConfig, fit: Fit) -> bool:
    """Whether a KV group that would compute the first chunk of a waiting sequence may have no further token."""
    if config.groups == 1:
        return False
    return shares_of(config, fit.first_group, len(fit.hits) * config.block_size).room(plan.group_loads) <= 0


def _note_candidate(
    state: CoreState, replica: Replica, candidate: Candidate, verdict: CandidateVerdict, fit: Fit | None = None
) -> None:
    if state.witness is not None:
        num_hits, num_lacking = (0, 0) if fit is None else (len(fit.hits), fit.num_lacking)
        urgency, sequence = candidate
        state.witness.append(
            CandidateSeen(replica.index, sequence.id, urgency, verdict, num_hits, num_lacking, sequence.skips)
        )


def _pass_over(state: CoreState, sequence: Sequence, passed: list[Sequence]) -> Sequence | None:
    """Go on with the next in line; or not, then the sequence is returned."""
    replicaset = state.set_of(sequence)
    replicaset.queue_of(sequence).pass_over()
    if is_held_back(state, sequence):
        return None
    is_last = max(sequence.skips, len(passed)) >= replicaset.config.max_skips
    passed.append(sequence)
    return sequence if is_last else None


def _partial_heap(state: CoreState, replica: Replica) -> list[tuple[Urgency, Sequence]]:
    """Partial prefills by this round's keys (urgencies are unique, so sequences are never compared)."""
    heap = []
    partial_keys = state.set_of(replica).partial_keys
    for sequence in replica.partials():
        priority, key, request, index = sequence.urgency
        heap.append(((priority, partial_keys.get(sequence.id, key), request, index), sequence))
    heapify(heap)
    return heap


def _add_chunk(state: CoreState, replica: Replica, plan: StepPlan, sequence: Sequence) -> None:
    """The next chunk of a partial prefill, after what can be hit by now; none if the batcher wants none."""
    config = replica.config
    before = sequence.launched_tokens
    replica.exchange_hits(sequence, config.block_size)
    if sequence.launched_tokens != before:
        if sequence.residency == 1:
            sequence.cached_tokens += sequence.launched_tokens - before
        note_progress(state, sequence)
    start = sequence.launched_tokens
    shares = None if config.groups == 1 else shares_of(config, replica.first_group(sequence), start)
    load = plan.load if shares is None else shares.largest(plan.group_loads)
    max_tokens = min(sequence.prefill_tokens - start, config.max_num_batched_tokens - load.num_tokens)
    if config.stages > 1:
        load.rest_tokens = sequence.prefill_tokens - start
    if shares is not None:
        max_tokens = min(max_tokens, left_in_shard(config, start))
        if max_tokens <= 0:
            plan.leave_out(sequence, "token_budget")
            return
    idle = not plan.decodes and not plan.chunks and not replica.in_flight
    num_tokens = ask_batcher(state, state.set_of(replica), load, sequence.view, max_tokens, idle=idle)
    if replica.states is not None:
        num_tokens = whole_blocks(sequence, num_tokens, max_tokens, config.block_size)
    if state.witness is not None:
        state.witness.append(ChunkAsked(replica.index, sequence.id, start, max_tokens, num_tokens))
    if not num_tokens:
        plan.leave_out(sequence, "batcher")
        return
    row = len(plan.decodes) + len(plan.chunks)
    if sequence.shipped_blocks < len(sequence.block_table):
        plan.blocks.append((row, sequence.shipped_blocks, sequence.block_table[sequence.shipped_blocks :]))
        sequence.shipped_blocks = len(sequence.block_table)
    sequence.launched_tokens = start + num_tokens
    parts_at = sequence.num_tree_blocks
    replica.publish(sequence, min(sequence.launched_tokens // config.block_size, len(sequence.block_names)))
    if replica.states is not None:
        keep_chunk_states(config, replica, plan, sequence, start, parts_at)
    final = sequence.launched_tokens == sequence.prefill_tokens
    samples = final and sequence.arrival.scheduling.kind == "generate"
    most = 0
    if samples:
        room = len(sequence.block_table) * config.block_size - sequence.prefill_tokens + 1
        most = min(config.max_tokens_per_row, sequence.max_total_tokens - sequence.prefill_tokens, room)
        sequence.sampling_in_flight += 1
        sequence.pending_tokens += most
    sequence.in_flight += 1
    plan.most.append(most)
    plan.chunks.append((sequence.request, sequence.index, start, num_tokens, int(samples)))
    plan.chunk_rows.append(ChunkRow(sequence, start, sequence.launched_tokens, final))
    plan.load.add_chunk(start, num_tokens)
    if shares is not None:
        shares.add_chunk(plan.group_loads, num_tokens)
    if final:
        replica.finish_prefill(sequence)
    note_progress(state, sequence)


def _launch(state: CoreState, replica: Replica, plan: StepPlan) -> None:
    """Put the step in flight and decide its launch."""
    most = plan.most if replica.config.max_tokens_per_row > 1 else []
    launched = state.note(
        Launched(
            s=state.next_seq,
            ts=state.now_ns,
            c=state.cause,
            replica=replica.index,
            epoch=replica.epoch,
            step=replica.next_step,
            decodes=plan.decodes,
            chunks=plan.chunks,
            most=most,
            blocks=plan.blocks,
            forget=replica.forget,
            num_tokens=plan.load.num_tokens,
            predicted_ns=plan.predicted_ns(state.set_of(replica).predictor),
            bucket=0 if plan.chunks else bucket_of(replica.config.graph_buckets, len(plan.decodes)),
            states=plan.states,
            loads=[load.num_tokens for load in plan.group_loads] if plan.group_loads else [],
        )
    )
    plan.step = launched.step
    step = StepInFlight(launched.step, launched.s, plan.decoding, plan.chunk_rows, plan.most, launched.predicted_ns)
    replica.launch(step)
    replica.forget = []
