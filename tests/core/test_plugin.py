"""What plug-ins see: views of sequences that stay true, and the load of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.core.plugin import Policy, SequenceView, StepLoad, milliseconds_to_ns
from eventlm.core.predictor import Predictor
from tests.core.rig import MILLISECOND, Rig
from tests.policies.views import view

SEEN: list[dict[str, int]] = []


class Watching(Policy, frozen=True, kw_only=True):
    """Notes what it sees and orders by arrival."""

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        SEEN.extend({name: getattr(s, name) for name in s.__struct_fields__} | {"now": now_ns} for s in sequences)
        return [s.arrival_ns for s in sequences]


@pytest.fixture
def seen() -> list[dict[str, int]]:
    SEEN.clear()
    return SEEN


def test_a_view_is_what_arrived(seen: list[dict[str, int]]) -> None:
    rig = Rig(policy=Watching())
    rig.arrive(10, 7, blocks=[1, 2], priority=3, deadline_ns=9, service_class="gold", session=5)
    (first,) = seen
    prefill_ns = rig.state.replicasets[0].predictor.prefill_ns(10, 0, 32)
    assert first == {
        "request": 2, "index": 0, "priority": 3, "arrival_ns": rig.now_ns, "deadline_ns": 9, "prompt_tokens": 10,
        "done_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "prefill_ns": prefill_ns,
        "remaining_ns": prefill_ns, "service_class": "gold", "session": 5, "now": rig.now_ns,
    }  # fmt: skip


def test_the_true_output_length_is_not_visible() -> None:
    assert not {name for name in SequenceView.__struct_fields__ if "max" in name or "limit" in name}


def test_a_partial_prefill_says_how_far_it_is(seen: list[dict[str, int]]) -> None:
    rig = Rig(policy=Watching(), max_num_batched_tokens=8)
    rig.arrive(8, 1, blocks=[1, 2])
    rig.finish_all()
    seen.clear()
    rig.arrive(30, 2, blocks=[1, 2, 3, 4, 5, 6, 7])
    rig.complete()
    rig.complete()
    assert [(s["done_tokens"], s["cached_tokens"]) for s in seen] == [(0, 0), (16, 8), (24, 8)]
    predictor = rig.state.replicasets[0].predictor
    assert [s["remaining_ns"] for s in seen] == [predictor.prefill_ns(30, done, 8) for done in (0, 16, 24)]


def test_after_a_preemption_kept_output_is_part_of_the_prompt(seen: list[dict[str, int]]) -> None:
    rig = Rig(policy=Watching(), max_num_seqs=1)
    victim = rig.arrive(6, 9)
    rig.complete()
    rig.complete()
    rig.arrive(4, 1, priority=-1)
    seen.clear()
    rig.complete()
    rig.complete()
    again = [s for s in seen if s["request"] == victim][-1]
    assert (again["prompt_tokens"], again["output_tokens"], again["done_tokens"]) == (9, 3, 0)
    assert again["remaining_ns"] == rig.state.replicasets[0].predictor.prefill_ns(9, 0, 32)


def test_slack_exists_under_every_policy() -> None:
    asked = view(arrival_ns=100, deadline_ns=1000, prefill_ns=50)
    assert asked.slack_ns(now_ns=200) == 100 + 1000 - 200 - 50
    assert view(prefill_ns=10**9).relative_deadline_ns() == 1_500_000_000
    assert view(prefill_ns=1).relative_deadline_ns() == 500_000_000
    assert view(prefill_ns=1).slack_ns(600_000_000) < 0


def test_a_load_counts_its_chunks() -> None:
    load = StepLoad(num_decodes=2, decode_tokens=4)
    load.add_chunk(100, 8)
    load.add_chunk(0, 3)
    assert (load.num_tokens, load.prefill_tokens, load.context_tokens) == (15, 11, 111)


@pytest.mark.parametrize(("milliseconds", "wanted"), [
    (500, 500 * MILLISECOND), (0.1, 100_000), (1.000001, 1_000_001), (1e-6, 1), (86_400_000.5, 86_400_000_500_000),
    (0.3, 300_000),
])  # fmt: skip
def test_milliseconds_are_exact(milliseconds: float, wanted: int) -> None:
    assert milliseconds_to_ns(milliseconds) == wanted


@given(
    coefficients=st.lists(st.sampled_from([0, 1, 3, 999, 1000, 1001, 40_000]), min_size=5, max_size=5),
    features=st.lists(st.integers(0, 500), min_size=4, max_size=4),
    start=st.integers(0, 60),
    reached=st.integers(0, 70),
    spare_ns=st.sampled_from([-1, 0, 1]),
)
def test_the_largest_chunk_depends_on_predicted_whole_nanoseconds(
    coefficients: list[int], features: list[int], start: int, reached: int, spare_ns: int
) -> None:
    predictor = Predictor.from_coefficients(coefficients)
    num_decodes, prefill_tokens, context_tokens, chunk_context = features
    load = StepLoad(
        num_decodes=num_decodes,
        prefill_tokens=prefill_tokens,
        context_tokens=context_tokens,
        chunk_context=chunk_context,
    )
    target_ns = load.predicted_ns(predictor, start, reached) + spare_ns
    fitting = [n for n in range(61) if load.predicted_ns(predictor, start, n) <= target_ns]
    assert load.largest_chunk(predictor, target_ns, start, 60) == max(fitting, default=0)
