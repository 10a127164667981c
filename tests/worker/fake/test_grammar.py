"""The fake worker keeps to grammars, and to its rule that a token depends on nothing but its sequence."""

from __future__ import annotations

import json

import pytest

from eventlm.sampling_params import SamplingParams
from eventlm.text.grammar import json_object_grammar, regex_grammar
from eventlm.worker.fake.runner import FakeRunner
from eventlm.worker.protocol import StepPayload
from tests.worker.launches import launched, new_sequence, payload

EOS = 257
BLOCKS = [(0, 0, list(range(100)))]


def runner() -> FakeRunner:
    return FakeRunner({}, epoch=1, block_size=4, num_blocks=100)


def run(
    grammar: str, seed: int, *, output: list[int] | None = None, forced: list[int] | None = None
) -> tuple[list[int], str]:
    """All tokens and the end; `forced` are what the sequence goes on with."""
    fake, tokens = runner(), list(output or [])
    params = SamplingParams(seed=seed, grammar=grammar, eos_token_ids=(EOS,), max_tokens=300)
    new = new_sequence(1, [5, 6, 7, *tokens], num_prompt_tokens=3, params=params)
    for step in range(300):
        length = 3 + len(tokens)
        if step:
            launch, beside = launched(step, decodes=[(1, 0, length, 0)]), StepPayload()
        else:
            launch, beside = launched(0, chunks=[(1, 0, 0, length, 1)], blocks=BLOCKS), payload(new)
        if forced is not None:
            beside = StepPayload(new=beside.new, forced=[[forced[step]]])
        result = fake.execute(launch, beside)
        tokens += result.tokens[0]
        if result.ends:
            return tokens, result.ends[0][1]
    return tokens, ""


@pytest.mark.parametrize("seed", range(10))
def test_any_object_is_valid_json_and_ends(seed: int) -> None:
    tokens, end = run(json_object_grammar(), seed)
    assert end in ("grammar", "eos")
    assert isinstance(json.loads(bytes(token for token in tokens if token < 256)), dict)


def test_a_history_changes_nothing() -> None:
    grammar = regex_grammar("[a-z]{20}", "p")
    whole, end = run(grammar, 4)
    assert end == "grammar"
    for length in (1, 7, 19):
        assert run(grammar, 4, output=whole[:length]) == (whole, "grammar")


def test_what_is_drawn_follows_what_was_forced() -> None:
    grammar = regex_grammar("(x[0-4]{3}|y[5-9]{3})", "p")
    forced = list(b"y567")
    tokens, end = run(grammar, 1, forced=forced)
    assert (bytes(tokens[1:]).isdigit(), set(bytes(tokens[1:]).decode()) <= set("56789"), end) == (
        True,
        True,
        "grammar",
    )
