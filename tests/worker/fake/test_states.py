from __future__ import annotations

from pathlib import Path
from typing import Any

from eventlm import LLM, SamplingParams
from eventlm.events import Finished, Launched, Preempted
from eventlm.replay.execute.execution import execute
from eventlm.worker.fake.states import FakeStates, fold
from eventlm.worker.sequence_table import Row, WorkerSequence
from tests.serving import verified
from tests.worker.launches import new_sequence


def row(
    token_ids: list[int], slot: int, start: int, num_tokens: int, source: int, copies: list[tuple[int, int]]
) -> Row:
    sequence = WorkerSequence(new_sequence(1, token_ids))
    sequence.state_slot = slot
    return Row(sequence, start, num_tokens, True, source, copies)


def test_a_state_depends_on_every_token_and_its_place() -> None:
    states = {fold(0, tokens) for tokens in ([], [0], [0, 0], [1], [1, 2], [2, 1])}
    assert len(states) == 6
    assert fold(fold(0, [5, 6]), [7]) == fold(0, [5, 6, 7])


def test_rows_go_on_from_their_source_and_keep_copies_on_the_way() -> None:
    states = FakeStates(4)
    assert states.advance(row([5, 6, 7, 8], 1, 0, 3, -1, [(2, 0), (3, 2)])) == fold(0, [5, 6, 7])
    assert states.advance(row([5, 6, 7, 8], 1, 3, 1, 1, [])) == fold(0, [5, 6, 7, 8])
    # Another goes on from the first copy, and keeps its own where that was.
    assert states.advance(row([5, 6, 9], 3, 2, 1, 0, [(3, 0)])) == fold(0, [5, 6, 9])
    assert states.advance(row([5, 6, 9, 1], 1, 3, 1, 0, [])) == fold(0, [5, 6, 9, 1])
    assert states.advance(row([5, 6, 7, 1], 1, 3, 1, 2, [])) == fold(0, [5, 6, 7, 1])


def test_a_row_from_zero_does_not_see_what_the_slot_had() -> None:
    states = FakeStates(1)
    states.advance(row([5], 0, 0, 1, -1, []))
    assert states.advance(row([6], 0, 0, 1, -1, [])) == fold(0, [6])


def chats(**options: Any) -> list[list[int]]:
    """Tokens of four chats of six turns, whose prompts go on from the answers, in worker processes."""
    fake = {"recurrent": True, "base_ns": 200_000, "prefill_token_ns": 0, "decode_ns": 0, "context_token_ns": 0}
    limits: dict[str, Any] = {"block_size": 4, "num_blocks": 33, "max_model_len": 128, "max_num_seqs": 4}
    histories = [[1] * 10 + [number] * 3 for number in range(4)]
    answers = []
    with LLM("fake", fake=fake, **limits, **options) as llm:
        for turn in range(6):
            params = SamplingParams(max_tokens=11, seed=turn)
            outputs = llm.generate([{"prompt_token_ids": history} for history in histories], params, use_tqdm=False)
            for history, output in zip(histories, outputs, strict=True):
                answers.append(output.outputs[0].token_ids)
                history += [*answers[-1], 3, 4, turn]
    return answers


def test_worker_processes_give_the_same_tokens_from_copies_as_from_zero(tmp_path: Path) -> None:
    found = chats(state_slots=10, state_interval=8, record=str(tmp_path), record_tokens=True)
    assert found == chats(prefix_cache=False)
    [run] = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    trace = verified(run)
    assert sum(event.cached_tokens > 0 for event in trace.of(Finished)) >= 6
    states = [state for event in trace.of(Launched) for state in event.states]
    assert sum(source not in (-1, slot) for _, slot, source, _ in states) >= 6
    assert trace.of(Preempted)
    again = execute(run, model="fake")
    assert (again.exit_code, again.num_tokens) == (0, 24 * 11)
