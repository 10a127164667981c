"""Plug-ins that raise or answer nonsense are reported, and the engine goes on by rules of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, ClassVar

import pytest

from eventlm.core.plugin import Batcher, Policy, ReplicaView, RequestView, Router, SequenceView, StepLoad
from eventlm.core.predictor import Predictor
from eventlm.events import Launched, PluginFailed, PolicySwapped
from eventlm.policies.edf import Edf
from tests.core.rig import Rig, arrival, rows


class BadPolicy(Policy, frozen=True, kw_only=True):
    """Answers whatever it was given, or raises it."""

    answer: Any = None
    margin: Any = None

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> Any:
        if isinstance(self.answer, type):
            raise self.answer("because")
        return [self.answer] * len(sequences) if not isinstance(self.answer, list | None) else self.answer

    def eviction_margin(self) -> Any:
        if isinstance(self.margin, type):
            raise self.margin("because")
        return self.margin


class BadStaticPolicy(BadPolicy, frozen=True, kw_only=True):
    static: ClassVar[bool] = True


class SortingPolicy(Policy, frozen=True, kw_only=True):
    """Brings what it is asked about into an order of its own."""

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        sequences.sort(key=lambda sequence: sequence.prompt_tokens)  # type: ignore[attr-defined]
        return [sequence.prompt_tokens for sequence in sequences]


class BadBatcher(Batcher, frozen=True, kw_only=True):
    answer: Any = None

    def chunk_tokens(self, load: StepLoad, sequence: SequenceView, max_tokens: int, predictor: Predictor) -> Any:
        if isinstance(self.answer, type):
            raise self.answer("because")
        return self.answer


class BadRouter(Router, frozen=True, kw_only=True):
    answer: Any = None

    def route(self, request: RequestView, replicas: Seq[ReplicaView]) -> Any:
        if isinstance(self.answer, type):
            raise self.answer("because")
        return self.answer


def errors(rig: Rig) -> set[str]:
    return {found.error for found in rig.decisions if isinstance(found, PluginFailed)}


@pytest.mark.parametrize("kind", [BadPolicy, BadStaticPolicy])
@pytest.mark.parametrize("answer", [ValueError, KeyError, SystemExit, None, [], [1] * 99, 0.5, True, "1", float("nan")])
def test_a_policy_that_fails_leaves_the_order_of_arrival(kind: type[BadPolicy], answer: object) -> None:
    rig = Rig(policy=kind(answer=answer), max_num_seqs=1)
    seqs = [rig.arrive(4, 2) for _ in range(3)]
    rig.finish_all()
    assert [end[0] for end in rig.finished()] == seqs
    raised = "TypeError" if answer is None else getattr(answer, "__name__", "")
    said = f"the policy raised {raised}" if raised else "the policy returned something else than "
    assert errors(rig)
    assert all(error.startswith(said) for error in errors(rig))


def test_a_policy_cannot_change_what_its_keys_are_for() -> None:
    rig = Rig(policy=SortingPolicy(), max_num_seqs=1)
    seqs = [rig.arrive(num_tokens, 2) for num_tokens in (9, 4, 7)]
    rig.finish_all()
    assert [end[0] for end in rig.finished()] == seqs
    assert errors(rig) == {"the policy raised AttributeError"}


def test_a_policy_that_fails_never_evicts_by_keys_it_did_not_make() -> None:
    rig = Rig(policy=BadPolicy(answer=ValueError, margin=-(10**18)), max_num_seqs=1)
    rig.arrive(4, 9)
    rig.arrive(4, 9)
    for _ in range(4):
        rig.complete()
    assert rig.preempted() == []


def test_keys_of_one_policy_are_not_compared_with_those_of_another() -> None:
    # Arrivals of millions of nanoseconds against keys around zero: every resident would seem evictable.
    class Small(Policy, frozen=True, kw_only=True):
        def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
            return [-1 for _ in sequences]

        def eviction_margin(self) -> int | None:
            return 0

    rig = Rig(policy=Edf(evict_margin_ms=0), others={"small": Small()}, max_num_seqs=1)
    rig.arrive(4, 9)
    rig.feed(PolicySwapped(name="small"))
    rig.arrive(4, 9)
    for _ in range(4):
        rig.complete()
    assert rig.preempted() == []


@pytest.mark.parametrize("margin", [ZeroDivisionError, SystemExit, 0.0, True, "far"])
def test_a_margin_that_is_none_means_never(margin: object) -> None:
    rig = Rig(policy=BadPolicy(answer=0, margin=margin), max_num_seqs=1)
    rig.arrive(4, 3)
    rig.arrive(4, 3)
    rig.finish_all()
    assert rig.preempted() == []
    assert len(errors(rig)) == 1
    assert "margin" in errors(rig).pop()


@pytest.mark.parametrize("answer", [RuntimeError, SystemExit, None, -1, 10**6, 2.0, True, "3"])
def test_a_batcher_that_fails_leaves_the_whole_chunk(answer: object) -> None:
    rig = Rig(batcher=BadBatcher(answer=answer))
    seq = rig.arrive(10, 2)
    assert rig.of(Launched)[0].chunks == [(seq, 0, 0, 10, 1)]
    assert len(rig.of(PluginFailed)) == 1
    assert "the batcher" in rig.of(PluginFailed)[0].error


def test_a_batcher_may_leave_a_chunk_for_later_but_not_for_ever() -> None:
    rig = Rig(batcher=BadBatcher(answer=0))
    first = rig.arrive(10, 4)
    # Nothing else runs: none at all would be nonsense.
    assert rows(rig.of(Launched)[0]) == [first]
    assert "answered something else than 1 to 10 tokens" in rig.of(PluginFailed)[0].error
    second = rig.arrive(10, 2)
    rig.complete()
    assert rows(rig.of(Launched)[0]) == [first]
    assert not rig.of(PluginFailed)
    rig.finish_all()
    assert [end[0] for end in rig.finished()] == [first, second]


@pytest.mark.parametrize("answer", [OSError, SystemExit, 7, -1, True, 0.0, "0"])
def test_a_router_that_fails_leaves_the_request_to_the_first_replica_with_room(answer: object) -> None:
    rig = Rig(router=BadRouter(answer=answer), num_replicas=2)
    seqs = rig.arrive_all(arrival(), arrival())
    assert len(rig.of(PluginFailed)) == 2
    assert all(rig.sequence(seq).home == -1 for seq in seqs)
    rig.finish_all()
    assert len(rig.finished()) == 2


def test_the_error_does_not_quote_what_the_plugin_said() -> None:
    # It might be anything, prompts of other modules included.
    rig = Rig(policy=BadPolicy(answer=ValueError))
    rig.arrive()
    assert errors(rig) == {"the policy raised ValueError"}
