"""`LLM.beam_search` finds the sequences that transformers' beam search finds, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eventlm import LLM, BeamSearchParams
from eventlm.errors import InputError
from eventlm.events import Arrived, Finished
from eventlm.text.beam_search.search import BRANCH_TOKENS
from tests.checkpoints import EOS_ID, VOCAB_SIZE, edit_json, make_checkpoint
from tests.serving import verified

PROMPTS = ["The quick brown fox", "It was the best of times, it was", "In the beginning " * 12]
#: So many that beams of a model with random weights end.
ENDS = [EOS_ID, *range(10, VOCAB_SIZE, 24)]
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    edit_json(folder / "generation_config.json", eos_token_id=ENDS)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def llm(folder: Path, runs: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"num_blocks": 256, "block_size": BLOCK_SIZE, "max_model_len": 256, "threads": 1}
    with LLM(folder, record=runs, **options) as llm:
        yield llm
    trace = verified(runs / "latest" / "trace.jsonl")
    assert trace.result.clean_end
    # Searches are ordinary requests: those after a search's first name it and find its blocks.
    arrivals = {event.s: event for event in trace.of(Arrived)}
    children = [event for event in arrivals.values() if event.scheduling.parent]
    assert len(children) > 100
    assert all(not arrivals[event.scheduling.parent].scheduling.parent for event in children)
    cached = {event.request: event.cached_tokens for event in trace.of(Finished)}
    hits = sum(cached[event.s] // BLOCK_SIZE for event in children)
    assert hits > 0.9 * sum((event.prompt_tokens - 1) // BLOCK_SIZE for event in children)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_beams(
    reference: Any, prompt: list[int], params: BeamSearchParams, ends: list[int]
) -> list[tuple[list[int], float]]:
    """Each beam's tokens and its score."""
    with torch.no_grad():
        found = reference.generate(
            torch.tensor([prompt]),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            do_sample=False,
            early_stopping="never",
            length_penalty=params.length_penalty,
            max_new_tokens=params.max_tokens,
            eos_token_id=ends or None,
            pad_token_id=2,
            return_dict_in_generate=True,
            output_scores=True,
        )
    beams = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = sequence[len(prompt) :]
        length = next((place for place, token in enumerate(tokens, start=1) if token in ends), len(tokens))
        beams.append((tokens[:length], score))
    return beams


@pytest.mark.parametrize(
    ("width", "length_penalty", "ignore_eos"),
    [(2, 1.0, False), (4, 0.0, False), (5, -1.0, False), (4, 2.0, True), (8, 0.5, False)],
)
def test_beams_are_those_of_transformers(
    llm: LLM, reference: Any, width: int, length_penalty: float, ignore_eos: bool
) -> None:
    params = BeamSearchParams(
        width, 24, length_penalty=length_penalty, ignore_eos=ignore_eos, include_stop_str_in_output=True
    )
    lengths = set()
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        token_ids = llm.get_tokenizer()(prompt)["input_ids"]
        expected = transformers_beams(reference, token_ids, params, [] if ignore_eos else ENDS)
        own = [sequence.tokens[len(token_ids) :] for sequence in output.sequences]
        assert own == [tokens for tokens, _ in expected]
        scores = [
            each.cum_logprob / len(tokens) ** length_penalty for each, tokens in zip(output.sequences, own, strict=True)
        ]
        assert scores == pytest.approx([score for _, score in expected], rel=1e-4)
        for each, tokens in zip(output.sequences, own, strict=True):
            assert each.finish_reason == ("stop" if tokens[-1] in ENDS and not ignore_eos else "length")
            assert [next(iter(entry)) for entry in each.logprobs] == tokens
            assert each.text.startswith(llm.get_tokenizer().decode(token_ids)[:8])
        lengths |= {len(tokens) for tokens in own}
    assert (lengths == {24}) == ignore_eos


def test_a_beam_needs_no_request_while_it_keeps_its_likeliest_token(llm: LLM) -> None:
    [before] = llm._composition.engine.metrics().log.replicas
    llm.beam_search(PROMPTS[0], BeamSearchParams(1, 3 * BRANCH_TOKENS, ignore_eos=True))
    [after] = llm._composition.engine.metrics().log.replicas
    # Three requests looked their prompts up: the search's, and the same with the tokens of one branch and of two.
    num_tokens = 3 * len(llm.get_tokenizer()(PROMPTS[0])["input_ids"]) + 3 * BRANCH_TOKENS
    assert after.queried_tokens - before.queried_tokens == num_tokens


def test_the_end_is_left_out_unless_asked_for(llm: LLM) -> None:
    shown, hidden = (
        llm.beam_search(PROMPTS[0], BeamSearchParams(4, 24, length_penalty=0.0, include_stop_str_in_output=shows))
        for shows in (True, False)
    )
    for with_end, without in zip(shown[0].sequences, hidden[0].sequences, strict=True):
        ends = with_end.finish_reason == "stop"
        assert without.tokens == (with_end.tokens[:-1] if ends else with_end.tokens)
    assert any(each.finish_reason == "stop" for each in shown[0].sequences)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (BeamSearchParams(0, 4), "beam_width"),
        (BeamSearchParams(2, 0), "max_tokens"),
        (BeamSearchParams(2, 4, length_penalty=11), "length_penalty"),
        (BeamSearchParams(2, 1000), "prompts[0]"),
    ],
)
def test_bad_parameters(llm: LLM, params: BeamSearchParams, param: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.beam_search(["x"], params)
    assert caught.value.param == param
