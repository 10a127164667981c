"""Where the sequences of a reply are, by the core's state and by what has ended."""

from __future__ import annotations

from eventlm.engine.response_status import reply_status
from eventlm.events import TextEnded
from eventlm.metrics.ended_rows import EndedRows
from tests.core.rig import Rig
from tests.metrics.test_ended_rows import row


def states(rig: Rig, *requests: tuple[int, int], rows: EndedRows | None = None) -> list[tuple[str, int]]:
    status = reply_status("id", requests, rig.state, rows or EndedRows())
    assert status.reply_id == "id"
    return [(sample.state, sample.output_tokens) for sample in status.samples]


def test_a_sequence_from_its_arrival_to_its_end() -> None:
    rig = Rig(max_num_seqs=1)
    first = rig.arrive(4, 2, has_text_ends=True)
    second = rig.arrive(4, 9, n=2)
    both = ((first, 1), (second, 2))
    assert states(rig, *both) == [("running", 0), ("waiting", 0), ("waiting", 0)]
    rig.complete()
    assert states(rig, *both)[0] == ("running", 1)
    rig.complete()
    assert states(rig, *both)[0] == ("ending", 2)
    rig.feed(TextEnded(request=first, index=0, position=2))
    assert states(rig, *both)[0] == ("finished", 0)
    rows = EndedRows()
    rows.request_ended(row(first))
    assert states(rig, *both, rows=rows)[0] == ("finished", 1)


def test_one_that_was_preempted_waits_again() -> None:
    rig = Rig(max_num_seqs=1)
    seq = rig.arrive(4, 9, priority=5)
    rig.complete()
    urgent = rig.arrive(4, 9, priority=-5)
    rig.complete()
    assert states(rig, (seq, 1), (urgent, 1)) == [("preempted", 2), ("running", 0)]


def test_after_the_engine_has_stopped_everything_is_over() -> None:
    status = reply_status("id", [(1, 1)], None, EndedRows())
    assert [sample.state for sample in status.samples] == ["finished"]
