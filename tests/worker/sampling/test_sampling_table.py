from __future__ import annotations

import numpy as np

from eventlm.types import SequenceId
from eventlm.worker.sampling.sampling_table import BANNED, GREEDY, MASKED, PENALIZED, PROCESSED, SamplingTable
from tests.worker.draws import sequence


def test_slots_are_used_again_and_grow() -> None:
    table = SamplingTable(100)
    sequences = [sequence(number, seed=number, temperature=(1 + number) / 256) for number in range(100)]
    for each in sequences:
        table.add(each)
    for each in sequences[10:90]:
        table.remove(each.id)
    table.remove(SequenceId(999, 0))
    late = [sequence(number, temperature=(1 + number) / 256) for number in range(200, 270)]
    for each in late:
        table.add(each)
    assert len(table) == 90
    held = [*sequences[:10], *late, *sequences[90:]]
    rows = table.rows(held)
    assert len(set(rows.slots.tolist())) == 90
    assert rows.params["temperature"].tolist() == [each.params.temperature for each in held]


def test_what_a_row_needs() -> None:
    table = SamplingTable(100)

    def needs(**params: object) -> int:
        each = sequence(len(table), **params)
        table.add(each)
        return int(table.rows([each]).params["needs"][0])

    assert needs() == 0
    assert needs(temperature=0.0) == needs(top_k=1) == GREEDY
    assert needs(top_p=0.5) == needs(top_k=5) == needs(min_p=0.1) == MASKED
    assert needs(top_k=100) == needs(top_k=10**6) == 0
    assert needs(repetition_penalty=1.1) == needs(frequency_penalty=-1.0) == PENALIZED
    assert needs(min_tokens=2, output=[3]) == BANNED
    assert needs(min_tokens=2, output=[3, 4]) == 0
    assert not any(needs(seed=5, logprobs=3, stop_token_ids=(4,), max_tokens=3) & PROCESSED for _ in range(2))


def test_min_tokens_is_over_when_the_output_is_long_enough() -> None:
    table = SamplingTable(100)
    each = sequence(1, min_tokens=2, eos_token_ids=(0,))
    table.add(each)
    found = []
    for _ in range(4):
        found.append(int(table.rows([each]).params["needs"][0]))
        each.token_ids.append(5)
    assert found == [BANNED, BANNED, 0, 0]


def test_who_draws_from_logits_as_the_model_gives_them() -> None:
    table = SamplingTable(100)
    free = [
        sequence(1, seed=5, output=[7], temperature=0.7),
        sequence(2, top_k=1),
        sequence(3, temperature=0.0, seed=1),
    ]
    late = sequence(4, min_tokens=2, eos_token_ids=(0,), output=[9])
    bound = [
        sequence(number + 5, **params)
        for number, params in enumerate(
            [
                {"top_k": 5},
                {"logit_bias": {3: 1.0}},
                {"frequency_penalty": 1.0},
                {"bad_words_token_ids": ((3,),)},
                {"grammar": "g"},
            ]
        )
    ]
    for each in [*free, late, *bound]:
        table.add(each)
    rows = table.draw_rows(free)
    assert rows is not None
    assert list(rows.temperatures) == [0.7, 0.0, 0.0]
    assert list(rows.keys) == table.rows(free).params["key"].tolist()
    assert list(rows.positions) == [1, 0, 0]
    assert all(table.draw_rows([free[0], each]) is None for each in [*bound, late])
    late.token_ids.append(9)
    assert table.draw_rows([late]) is not None
    table.remove(free[0].id)
    assert table.draw_rows(free) is None


def test_only_rows_with_penalties_are_counted() -> None:
    table = SamplingTable(100)
    plain, penalized = sequence(1), sequence(2, presence_penalty=1.0)
    table.add(plain)
    table.add(penalized)
    rows = table.rows([plain, penalized])
    assert rows.params["counts_row"][0] == -1
    table.record(rows, np.array([7, 8]))
    taken = table.counts.take(rows.params["counts_row"][1:])
    assert dict(zip(taken.ids[0].tolist(), taken.counts[0].tolist(), strict=True)) == {1: 0, 8: 1}
    assert not table.lists
