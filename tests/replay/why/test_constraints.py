"""Values, limits and verdicts of constraints where they are known by construction."""

from __future__ import annotations

from eventlm.core.plugin import Batcher, SequenceView, StepLoad
from eventlm.core.predictor import Predictor
from eventlm.core.state.sequence import State
from eventlm.core.state.snapshot import take
from eventlm.events import Paused, TextEnded, WorkerLost, WorkerUp
from tests.core.rig import Rig, arrival
from tests.replay.why.watched import WatchedRig, constraint


def test_asking_changes_nothing() -> None:
    rig = WatchedRig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64)
    _, second = rig.arrive_all(arrival(32, 4), arrival(20, 4))
    before = take(rig.state), rig.state.digests()
    rig.ask(second)
    assert (take(rig.state), rig.state.digests()) == before


def test_blocks_that_it_needs_and_can_have() -> None:
    # 12 blocks of 4 tokens: the first takes 9 of them, the second needs 6.
    rig = WatchedRig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64)
    first, second = rig.arrive_all(arrival(32, 4), arrival(20, 4))
    found = rig.ask(second)
    blocks = constraint(found, "blocks")
    assert (blocks.value, blocks.limit, blocks.verdict, blocks.decides) == (6, 3, "stops", True)
    assert found.num_lacking == 3
    assert constraint(found, "token_budget").value == 32
    assert constraint(found, "sequence_limit").value == 1
    assert [each.name for each in found.constraints if each.decides] == ["blocks"]
    assert rig.ask(first).cause is None
    assert not any(each.decides for each in rig.ask(first).constraints)


def test_what_is_cached_need_not_be_allocated() -> None:
    rig = WatchedRig(num_blocks=8, max_model_len=28, max_num_seqs=1)
    rig.arrive(13, 4, blocks=[1, 2, 3])
    request = rig.arrive(13, 4, blocks=[1, 2, 3])
    blocks = constraint(rig.ask(request), "blocks")
    # It reserves 5, of which 3 are there.
    assert blocks.value == 2
    assert "3 cached" in blocks.detail


def test_slots_and_what_else_would_stop_it() -> None:
    rig = WatchedRig(max_num_seqs=1, num_blocks=8, max_model_len=28)
    rig.arrive(20, 4)
    request = rig.arrive(20, 4)
    rig.complete()
    found = rig.ask(request)
    assert found.cause == "sequence_limit"
    limit = constraint(found, "sequence_limit")
    assert (limit.value, limit.limit, limit.verdict, limit.decides) == (1, 1, "stops", True)
    # It would not fit either; that is not what the plan came to.
    blocks = constraint(found, "blocks")
    assert (blocks.verdict, blocks.decides) == ("stops", False)


def test_a_full_step_and_a_full_pipeline() -> None:
    rig = WatchedRig(max_num_batched_tokens=8)
    _, second = rig.arrive_all(arrival(8, 4), arrival(8, 4))
    found = rig.ask(second)
    budget = constraint(found, "token_budget")
    assert (budget.value, budget.limit, budget.verdict, budget.decides) == (8, 8, "stops", True)
    # The plan could have taken it, so the pipeline is not the reason.
    assert constraint(found, "steps_in_flight").verdict == "met"
    late = rig.arrive(4, 4)
    found = rig.ask(late)
    steps = constraint(found, "steps_in_flight")
    assert (steps.value, steps.limit, steps.verdict, steps.decides) == (1, 1, "stops", True)
    assert constraint(found, "token_budget").verdict == "unasked"


def test_the_line_is_closed_and_by_whom() -> None:
    rig = WatchedRig(num_blocks=12, max_model_len=44, max_skips=0, max_num_batched_tokens=64)
    _, closer, behind = rig.arrive_all(arrival(32, 4), arrival(20, 4), arrival(4, 4))
    found = rig.ask(behind)
    head = constraint(found, "head_of_line")
    assert (head.verdict, head.decides, found.other) == ("stops", True, (closer, 0))
    assert (head.value, head.limit) == (0, 0)
    assert constraint(found, "blocks").verdict == "met"
    assert constraint(rig.ask(closer), "head_of_line").verdict == "met"


def test_times_that_it_was_passed_over() -> None:
    rig = WatchedRig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64, max_skips=3)
    _, second, _ = rig.arrive_all(arrival(32, 4), arrival(20, 4), arrival(4, 4))
    skips = constraint(rig.ask(second), "skips")
    assert (skips.value, skips.limit, skips.verdict) == (1, 3, "met")


class Stingy(Batcher, frozen=True, kw_only=True):
    """Nothing beside others."""

    def chunk_tokens(self, load: StepLoad, sequence: SequenceView, max_tokens: int, predictor: Predictor) -> int:
        return 0 if load.num_tokens else max_tokens


def test_what_the_batcher_was_asked_and_gave() -> None:
    rig = WatchedRig(batcher=Stingy())
    _, second = rig.arrive_all(arrival(8, 4), arrival(6, 4))
    found = rig.ask(second)
    batcher = constraint(found, "batcher")
    assert (batcher.value, batcher.limit, batcher.verdict, batcher.decides) == (0, 6, "stops", True)
    third = rig.arrive(40, 4)
    rig.complete()
    rig.complete()
    batcher = constraint(rig.ask(third), "batcher")
    assert (batcher.value, batcher.limit, batcher.verdict) == (0, 31, "stops")


def test_rows_of_its_own_in_flight() -> None:
    rig = WatchedRig(max_steps_in_flight=3, max_decodes_in_flight_per_seq=2)
    request = rig.arrive(4, 20)
    rows = constraint(rig.ask(request), "rows_in_flight")
    assert (rows.value, rows.limit, rows.verdict) == (2, 2, "stops")


def test_the_engine_is_paused_and_no_worker_is_up() -> None:
    rig = WatchedRig(up=False)
    request = rig.arrive()
    found = rig.ask(request)
    assert found.cause == "worker"
    (decisive,) = [each for each in found.constraints if each.decides]
    assert (decisive.name, decisive.value, decisive.limit) == ("worker", 0, 1)
    rig.feed(Paused())
    rig.feed(WorkerUp(replica=0, epoch=1))
    found = rig.ask(request)
    assert found.cause == "paused"
    assert constraint(found, "paused").decides


def test_grammar_text_end_and_rows_from_before_a_preemption() -> None:
    rig = WatchedRig(max_num_seqs=1, max_steps_in_flight=2)
    waiting = rig.arrive(waits_for_grammar=True)
    assert constraint(rig.ask(waiting), "grammar").decides
    closing = rig.arrive(4, 1, has_text_ends=True)
    rig.complete()
    found = rig.ask(closing)
    assert constraint(found, "text_end").decides
    assert "length" in constraint(found, "text_end").detail
    rig.feed(TextEnded(request=closing, index=0, position=1))
    victim = rig.arrive(4, 20)
    rig.arrive(1, 1, priority=-1)
    found = rig.ask(victim)
    if found.cause is None:
        rig.complete()
        found = rig.ask(victim)
    assert found.cause == "draining"
    draining = constraint(found, "draining")
    assert (draining.verdict, draining.decides, draining.value) == ("stops", True, 1)


def test_a_suspect_is_tried_alone() -> None:
    rig = WatchedRig(max_losses=5)
    first, second = rig.arrive_all(arrival(4, 8), arrival(4, 8))
    rig.flying[0].clear()
    rig.feed(WorkerLost(replica=0, epoch=1, crashed=True))
    rig.feed(WorkerUp(replica=0, epoch=2))
    found = [rig.ask(request) for request in (first, second)]
    (waits,) = [each for each in found if each.cause is not None]
    trial = constraint(waits, "trial")
    assert (waits.cause, trial.verdict, trial.decides, trial.value) == ("trial", "stops", True, 2)


def test_every_replica_that_could_take_it_is_named() -> None:
    rig: Rig = WatchedRig(num_replicas=2, max_num_seqs=1)
    *_, last = rig.arrive_all(arrival(4, 8), arrival(4, 8), arrival(4, 8))
    assert isinstance(rig, WatchedRig)
    found = rig.ask(last)
    limits = [each for each in found.constraints if each.name == "sequence_limit"]
    assert [(each.replica, each.verdict, each.decides) for each in limits] == [(0, "stops", True), (1, "stops", False)]


def test_the_share_of_a_step_of_a_pipeline() -> None:
    rig = WatchedRig(num_stages=2, run_ahead_ms=1, max_num_batched_tokens=8)
    first, _, _, last = rig.arrive_all(*(arrival(2, 20) for _ in range(4)))
    prompt = rig.arrive(40, 1)
    rig.complete()
    found = rig.ask(last)
    share = constraint(found, "micro_batch")
    assert (share.value, share.limit, share.verdict, share.decides) == (2, 2, "stops", True)
    assert share.detail == "a step takes 2 of 4 decodes; the plan of step 2 has 2"
    assert constraint(found, "rows_in_flight").limit == 1
    assert constraint(found, "steps_in_flight").limit == 3
    assert constraint(rig.ask(first), "micro_batch").verdict == "unasked"
    assert constraint(rig.ask(prompt), "micro_batch").limit == 8


def test_no_step_of_a_pipeline_has_decodes_beyond_the_micro_batches() -> None:
    rig = WatchedRig(num_stages=2)
    rig.arrive_all(*(arrival(2, 20) for _ in range(4)))
    rig.complete()
    rig.complete()
    late = rig.arrive(4, 20)
    while rig.sequence(late).state is not State.DECODE or rig.sequence(late).in_flight:
        rig.complete()
    share = constraint(rig.ask(late), "micro_batch")
    assert (share.value, share.limit, share.verdict, share.decides) == (0, 0, "stops", True)
    assert share.detail == "in flight: 2 steps with decodes, one for each share"
