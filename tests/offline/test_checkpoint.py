"""`LLM` on real weights: its tokens, log-probabilities and embeddings are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from eventlm import LLM, SamplingParams
from eventlm.engine.setup import worker_setups
from eventlm.errors import CheckpointError, EventLMError, InputError, PullError, UsageError
from eventlm.offline.options import compose_from
from eventlm.offline.prompts import parse_prompts, render_conversations
from tests.checkpoints import EOS_ID, IM_END_ID, VOCAB_SIZE, edit_json, make_checkpoint, make_tokenizer
from tests.serving import verified

PROMPTS = ["The quick brown fox", "It was the best of times, it was", "In the beginning " * 12, "a"]
#: What float32 sums in another order differ by.
CLOSE: dict[str, float] = {"rel": 1e-3, "abs": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def llm(folder: Path, runs: Path) -> Iterator[LLM]:
    # Chunks smaller than the long prompt, and blocks small enough to be shared.
    options: dict[str, Any] = {"num_blocks": 128, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    options |= {"max_model_len": 256, "threads": 1}
    with LLM(folder, seed=1, record=runs, **options) as llm:
        yield llm
    trace = verified(runs / "latest" / "trace.jsonl")
    assert trace.result.clean_end


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.no_grad():
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return list(output[0, len(prompt) :].tolist())


def all_logprobs(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """Of each token's successor, [tokens, vocabulary]."""
    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([token_ids])).logits[0], dim=-1)


def test_greedy_tokens(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt_token_ids == tokenizer(prompt)["input_ids"]
        [completion] = output.outputs
        assert completion.token_ids == greedy(reference, output.prompt_token_ids, 24)
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    again = llm.generate([{"prompt_token_ids": output.prompt_token_ids} for output in outputs], params, use_tqdm=False)
    assert [output.outputs for output in again] == [output.outputs for output in outputs]
    # Now the full blocks before the last token are there.
    assert [output.num_cached_tokens for output in again] == [
        (len(output.prompt_token_ids) - 1) // 4 * 4 for output in again
    ]


def test_a_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    [output] = llm.chat(messages, SamplingParams(max_tokens=4), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert output.prompt_token_ids == expected
    assert output.prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_log_probabilities(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=1.5, n=2, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        prompt = output.prompt_token_ids
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for completion in output.outputs:
            rows = all_logprobs(reference, prompt + completion.token_ids)
            assert completion.logprobs is not None
            indices = zip(completion.token_ids, completion.logprobs, rows[len(prompt) - 1 :], strict=False)
            for token_id, found, row in indices:
                check_row(found, token_id, row, 3)
            assert len(completion.logprobs) == len(completion.token_ids)
            chosen = [next(iter(found.values())).logprob for found in completion.logprobs]
            assert completion.cumulative_logprob == pytest.approx(sum(chosen))
        for token_id, entry, row in zip(prompt[1:], output.prompt_logprobs[1:], rows, strict=False):
            assert entry is not None
            check_row(entry, token_id, row, 2)
        assert len(output.prompt_logprobs) == len(prompt)


def check_row(found: dict[int, Any], token_id: int, row: torch.Tensor, num_top: int) -> None:
    """One token's dict against all log-probabilities in its place."""
    best = row.topk(num_top).indices.tolist()
    assert set(found) == {token_id, *best}
    for each, entry in found.items():
        assert entry.logprob == pytest.approx(row[each].item(), **CLOSE)
        assert entry.rank == int((row > row[each]).sum()) + 1


def test_embeddings(llm: LLM, reference: Any) -> None:
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    for output in outputs:
        with torch.no_grad():
            hidden = reference.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=0).tolist()
        assert output.outputs.embedding == pytest.approx(expected, **CLOSE)
        assert output.finished
    # What the cache holds makes no difference.
    again = llm.embed(PROMPTS[2], use_tqdm=False)[0]
    assert again.outputs.embedding == pytest.approx(outputs[2].outputs.embedding, **CLOSE)


def test_parameters_reach_the_worker(llm: LLM) -> None:
    def tokens(**params: Any) -> list[int]:
        params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True} | params
        return llm.generate("The quick", SamplingParams(**params), use_tqdm=False)[0].outputs[0].token_ids

    plain = tokens()
    assert tokens(allowed_token_ids=[70, 71]) != plain
    assert set(tokens(allowed_token_ids=[70, 71])) <= {70, 71}
    assert set(tokens(logit_bias={80: 100.0})) == {80}
    assert len(set(tokens(frequency_penalty=2.0, logit_bias={80: 30.0, 81: 30.0}))) > 1
    assert tokens(stop_token_ids=[plain[0]], min_tokens=3) != plain[:1]
    [word] = llm.get_tokenizer().encode("a")
    assert set(tokens(logit_bias={word: 100.0})) == {word}
    assert word not in tokens(bad_words=["a"], logit_bias={word: 100.0})


def test_special_tokens_in_the_text(llm: LLM) -> None:
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "allowed_token_ids": [IM_END_ID]}
    [hidden] = llm.generate("a", SamplingParams(**params), use_tqdm=False)[0].outputs
    [shown] = llm.generate("a", SamplingParams(skip_special_tokens=False, **params), use_tqdm=False)[0].outputs
    assert (hidden.text, shown.text) == ("", "<|im_end|>" * 3)
    assert hidden.token_ids == [IM_END_ID] * 3


def test_the_end_of_sequence(llm: LLM) -> None:
    [completion] = llm.generate("a", SamplingParams(temperature=0, logit_bias={EOS_ID: 100}), use_tqdm=False)[0].outputs
    assert (completion.text, completion.token_ids) == ("", [EOS_ID])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_another_models_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other")
    config = other / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"no_template"'))
    options = {"model": folder, "kv_memory": "8MiB"}
    composition, tokenizer_folder = compose_from(options, tokenizer=other)
    assert tokenizer_folder == other
    assert composition.tokenizer.chat_template is None
    assert [worker.tokenizer for worker in worker_setups(composition.engine.setup)] == [str(other)]
    assert compose_from(options).tokenizer_folder == folder
    with pytest.raises(InputError, match="this model has no chat template; give chat_template="):
        render_conversations([], composition.tokenizer, composition.vocab_size)


def test_a_text_of_tokens_that_the_model_does_not_have(folder: Path, tmp_path: Path) -> None:
    composition, _ = compose_from({"model": folder, "kv_memory": "8MiB"}, tokenizer=larger_tokenizer(tmp_path))
    tokenizer, vocab_size = composition.tokenizer, composition.vocab_size
    assert len(parse_prompts(["a", "b"], tokenizer, vocab_size)) == 2
    problem = rf"the id of its token '<tool>' is {vocab_size}, but the model's are from 0 to {vocab_size - 1}; this tok"
    with pytest.raises(InputError, match=rf"^prompts\[1\]: {problem}"):
        parse_prompts(["a", "a <tool> b"], tokenizer, vocab_size)
    with pytest.raises(InputError, match=rf"^messages: {problem}"):
        render_conversations([{"role": "user", "content": "<tool>"}], tokenizer, vocab_size)


def larger_tokenizer(folder: Path) -> Path:
    """With a token more than the model of these tests has."""
    make_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": VOCAB_SIZE, "content": "<tool>"})
    edit_json(folder / "tokenizer.json", added_tokens=content["added_tokens"])
    return folder


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("nowhere", UsageError, "tokenizer nowhere: no such folder; give a folder with a tokenizer.json, a repository"),
        ("empty", CheckpointError, "tokenizer empty: this folder has no tokenizer.json; give a folder with a"),
        (
            "a/repository",
            PullError,
            "tokenizer a/repository: there is no such folder, and a/repository is not complete",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_had_is_named(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    error: type[EventLMError],
    message: str,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(error) as caught:
        LLM(folder, tokenizer=given, kv_memory="8MiB")
    assert str(caught.value).startswith(message)
