"""What each parameter does to the logits: transformers' processors where it has one, else the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from eventlm.worker.sampling.logits_processors import process_logits
from eventlm.worker.sequence_table import WorkerSequence
from tests.worker.draws import make_sampler, random_logits, sequence

VOCAB_SIZE = 300
PROMPT = [5, 6, 7, 5, 299]
OUTPUT = [8, 6, 8, 8, 1, 2]


def processed(logits: torch.Tensor, sequences: list[WorkerSequence]) -> torch.Tensor:
    """These sequences' logits after all that they ask for."""
    table = make_sampler(logits.shape[1], sequences).table
    logits = logits.clone()
    process_logits(logits, table.rows(sequences), table)
    return logits


Maker = Callable[[], LogitsProcessor]


@pytest.mark.parametrize(
    ("params", "make"),
    [
        ({"repetition_penalty": 1.7}, lambda: RepetitionPenaltyLogitsProcessor(1.7)),
        ({"repetition_penalty": 0.6}, lambda: RepetitionPenaltyLogitsProcessor(0.6)),
        (
            {"bad_words_token_ids": ((9,), (1, 2, 11), (2, 12), (3, 2, 13), (2, 2), (4,))},
            lambda: NoBadWordsLogitsProcessor([[9], [1, 2, 11], [2, 12], [3, 2, 13], [2, 2], [4]]),
        ),
        (
            {"min_tokens": 7, "eos_token_ids": (3, 4), "stop_token_ids": (2,)},
            lambda: MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, [3, 4, 2]),
        ),
        (
            {"min_tokens": 6, "eos_token_ids": (3, 4), "ignore_eos": True},
            lambda: MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [3, 4]),
        ),
        (
            {"logit_bias": {3: 2.5, 0: -7.0, 299: 100.0}},
            lambda: SequenceBiasLogitsProcessor({(3,): 2.5, (0,): -7.0, (299,): 100.0}),
        ),
    ],
)
def test_transformers_has_it(params: dict[str, Any], make: Maker) -> None:
    logits = random_logits(1, VOCAB_SIZE)
    expected = make()(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    found = processed(logits, [sequence(prompt=PROMPT, output=OUTPUT, **params)])
    assert torch.allclose(found, expected)
    assert not torch.equal(found, logits) or params.get("min_tokens") == 6


def test_presence_and_frequency_are_of_the_output() -> None:
    logits = random_logits(1, VOCAB_SIZE)
    found = processed(logits, [sequence(prompt=PROMPT, output=OUTPUT, presence_penalty=0.5, frequency_penalty=0.25)])
    change = torch.zeros(1, VOCAB_SIZE)
    for token, count in ((8, 3), (6, 1), (1, 1), (2, 1)):
        change[0, token] = -0.5 - 0.25 * count
    assert torch.allclose(found - logits, change, atol=1e-6)


def test_penalties_follow_the_output_as_it_grows_and_begin_again_after_a_preemption() -> None:
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25}
    grown = [sequence(number, prompt=[1, 2, number], **params) for number in range(3)]
    plain = sequence(9, prompt=[1, 2, 3], temperature=0.0)
    sampler = make_sampler(VOCAB_SIZE, [*grown, plain])
    for step in range(40):
        logits = random_logits(4, VOCAB_SIZE, seed=step)
        for each, token in zip([*grown, plain], sampler.sample(logits, [*grown, plain]).tolist(), strict=True):
            each.token_ids.append(token)
    rows = sampler.table.rows(grown)
    before = random_logits(3, VOCAB_SIZE)
    logits = before.clone()
    process_logits(logits, rows, sampler.table)
    again = [
        sequence(number, prompt=[1, 2, number], output=each.token_ids[3:], **params)
        for number, each in enumerate(grown)
    ]
    assert torch.equal(logits, processed(before, again))


def test_allowed_ids_are_the_only_ones() -> None:
    logits = random_logits(2, VOCAB_SIZE)
    found = processed(logits, [sequence(1, allowed_token_ids=(7, 5, 400)), sequence(2, bad_words_token_ids=((5,),))])
    assert found[0].isfinite().nonzero().flatten().tolist() == [5, 7]
    assert torch.equal(found[0, [5, 7]], logits[0, [5, 7]])
    assert found[1].isinf().nonzero().flatten().tolist() == [5]


def test_bans_hold_among_the_allowed_ids_unless_they_leave_none() -> None:
    logits = random_logits(3, VOCAB_SIZE)
    found = processed(
        logits,
        [
            sequence(1, allowed_token_ids=(5, 7), bad_words_token_ids=((5,),)),
            sequence(2, allowed_token_ids=(5, 7), min_tokens=3, stop_token_ids=(7,)),
            sequence(3, allowed_token_ids=(0,), min_tokens=3, eos_token_ids=(0,)),
        ],
    )
    assert [row.isfinite().nonzero().flatten().tolist() for row in found] == [[7], [5], [0]]


def test_a_bad_word_begins_in_the_output() -> None:
    words = ((3, 4, 5), (4, 6), (2, 3, 4, 7), (8,))
    histories = ([2, 3, 4], []), ([2, 3], [4]), ([2], [3, 4]), ([], [2, 3, 4])
    sequences = [sequence(number, prompt=[1, *prompt], output=output, bad_words_token_ids=words)
                 for number, (prompt, output) in enumerate(histories)]  # fmt: skip
    found = processed(torch.zeros(4, VOCAB_SIZE), sequences)
    assert [row.isinf().nonzero().flatten().tolist() for row in found] == [[8], [6, 8], [5, 6, 8], [5, 6, 7, 8]]


def test_the_order() -> None:
    """A bias is added before the penalties see the logit, and nothing brings back what was banned."""
    logits = torch.full((1, VOCAB_SIZE), 2.0)
    found = processed(
        logits,
        [
            sequence(
                prompt=[4], output=[4], logit_bias={4: 6.0, 5: 50.0}, repetition_penalty=4.0, presence_penalty=0.5,
                bad_words_token_ids=((5,),),
            )
        ],
    )  # fmt: skip
    assert found[0, 4].item() == (2.0 + 6.0) / 4.0 - 0.5
    assert found[0, 5].item() == -math.inf


def test_ids_beyond_the_vocabulary_do_nothing() -> None:
    logits = random_logits(1, VOCAB_SIZE)
    params = {"logit_bias": {VOCAB_SIZE: 5.0}, "bad_words_token_ids": ((10**6,), (1, VOCAB_SIZE)), "min_tokens": 5}
    found = processed(logits, [sequence(prompt=[1], eos_token_ids=(VOCAB_SIZE + 1,), **params)])
    assert torch.equal(found, logits)
