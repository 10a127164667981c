"""Requests to a real server over a checkpoint in fp32: what harnesses measure, and what a cache is shared by."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from eventlm.events import Arrived, Preempted
from eventlm.models.fetch.default_model import CONVERTED, DEFAULT_MODEL
from eventlm.models.fetch.pull import cached
from tests.checkpoints import make_checkpoint
from tests.processes import PATIENCE_SECONDS
from tests.serving import Server, serve

REPOSITORY = Path(__file__).parents[2]
TEXT = (
    "the quick brown fox jumps over a lazy dog what is the capital of France it was the best of times and the worst "
    "every step is one event on the log café 日本語 request"
)
#: Sums of log-probabilities in float32; those of whole texts are in the hundreds.
CLOSE = {"abs": 1e-4, "rel": 2e-6}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("served"), "--model", str(checkpoint), "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def texts(rng: random.Random, count: int, most_words: int) -> list[str]:
    return [" ".join(rng.choices(TEXT.split(), k=rng.randrange(1, most_words))) for _ in range(count)]


def write_tasks(folder: Path, client: openai.OpenAI, model: str) -> Path:
    """Four tasks over one file of documents. The first choice of some is what the model finds most likely.

    lm-eval looks at whether a continuation's tokens are the most likely ones, too.
    """
    rng = random.Random(11)
    questions = texts(rng, 128, 30)
    likely = client.completions.create(model=model, prompt=questions, max_tokens=1, temperature=0).choices
    # Behind a question these are tokens of their own.
    known = [index for index, choice in enumerate(likely) if re.fullmatch("[ !-/:-@][a-z]*", choice.text)]
    assert len(known) > 4
    documents = []
    for number, index in enumerate([*known[:6], *range(10)]):
        choices = [" " + text for text in texts(rng, 4, 5)]
        if number < 6:
            choices[0] = likely[index].text
        documents.append({"question": questions[index], "choices": choices, "answer": rng.randrange(4)})
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    tasks: dict[str, dict[str, Any]] = {
        "local_choice": {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
        },
        "local_cloze": {
            "output_type": "loglikelihood", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
        "local_rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "local_generation": {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n", "e "], "max_gen_toks": 16, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }  # fmt: skip
    for name, task in tasks.items():
        source = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"validation": str(data)}},
            "validation_split": "validation",
            "target_delimiter": "",
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))
    return folder


def test_lm_eval_gets_the_scores_of_its_own_backend(
    served: Server, client: openai.OpenAI, checkpoint: Path, tmp_path: Path
) -> None:
    check_scores(served, client, checkpoint, tmp_path)


@pytest.mark.soak
def test_lm_eval_gets_its_scores_of_the_default_model(tmp_path: Path) -> None:
    checkpoint = cached(DEFAULT_MODEL + CONVERTED)
    assert checkpoint is not None
    flags = ("--model", DEFAULT_MODEL + CONVERTED, "--dtype", "float32", "--max-model-len", "512")
    with serve(tmp_path, *flags) as server, server.client() as client:
        check_scores(server, client, checkpoint, tmp_path)


def check_scores(served: Server, client: openai.OpenAI, checkpoint: Path, tmp_path: Path) -> None:
    """Those of the server are those of lm-eval's own backend on the same checkpoint."""
    tasks = write_tasks(tmp_path, client, served.model)
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.lm_eval_scores", served.url, served.model, str(checkpoint), str(tasks)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=5 * PATIENCE_SECONDS,
        env=os.environ | {
            "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    scores = json.loads(done.stdout.splitlines()[-1])
    theirs, ours = scores["hf"], scores["local-completions"]
    for task in ("local_choice", "local_generation"):
        assert ours["metrics"][task] == theirs["metrics"][task]
    for task in ("local_cloze", "local_rolling"):
        assert ours["metrics"][task] == pytest.approx(theirs["metrics"][task], rel=1e-4)
    assert ours["documents"]["local_generation"] == theirs["documents"]["local_generation"]
    for task in ("local_choice", "local_cloze"):
        found, expected = (
            [response for document in scored["documents"][task] for [response] in document] for scored in (ours, theirs)
        )
        assert [likelihood for likelihood, _ in found] == pytest.approx([each[0] for each in expected], **CLOSE)
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
        assert {is_greedy for _, is_greedy in found} == {True, False}
    rolled, expected = ([each[0][0] for each in scored["documents"]["local_rolling"]] for scored in (ours, theirs))
    assert rolled == pytest.approx(expected, **CLOSE)


def test_nothing_generated_is_scored_the_same(served: Server, client: openai.OpenAI) -> None:
    prompts = [[*range(5, 60)], [7], [*range(100, 103)]]
    fields: Any = {"model": served.model, "prompt": prompts, "echo": True, "logprobs": 2, "temperature": 0}
    scored = client.completions.create(**fields, max_tokens=0)
    continued = client.completions.create(**fields, max_tokens=1)
    assert scored.usage is not None
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (59, 0)
    for choice, longer, prompt in zip(scored.choices, continued.choices, prompts, strict=True):
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert longer.logprobs is not None
        [first, *found], [_, *expected] = choice.logprobs.token_logprobs or [], longer.logprobs.token_logprobs or []
        assert first is None
        assert len(expected) == len(prompt)
        assert found == pytest.approx(expected[:-1], **CLOSE)
        assert longer.text.startswith(choice.text)
    # Echoed text alone needs no scores, and whatever is in the cache by now does not matter.
    text = client.completions.create(**{**fields, "logprobs": None}, max_tokens=0)
    assert [choice.text for choice in text.choices] == [choice.text for choice in scored.choices]


async def test_streamed_echoes_join_to_the_whole_ones_under_preemption(tmp_path: Path) -> None:
    """Prompts in many chunks, computed again after a preemption: each token is scored and shown once."""
    limits = ["--block-size", "4", "--num-blocks", "32", "--max-num-batched-tokens", "16", "--max-num-seqs", "8"]
    server = Server(tmp_path, "--model", "fake", *limits)
    rng = random.Random(12)

    async def check(client: openai.AsyncOpenAI, number: int) -> None:
        prompts: list[list[int]] = [
            rng.choices(range(1024), k=rng.randrange(1, 60)) for _ in range(rng.randrange(1, 4))
        ]
        fields: dict[str, Any] = {
            "model": "fake", "prompt": rng.choice([prompts, texts(rng, 2, 9)]), "echo": True, "seed": number,
            "logprobs": rng.choice([None, 0, 2]), "max_tokens": rng.choice([0, 1, 20]), "n": rng.choice([1, 1, 2]),
            "stop": rng.choice([None, ["e", " of"]]), "extra_body": {"return_token_ids": True},
        }  # fmt: skip
        stream = await client.completions.create(**fields, stream=True)
        joined: dict[int, dict[str, Any]] = {}
        async for chunk in stream:
            [part] = chunk.choices
            found = joined.setdefault(part.index, {"text": "", "token_ids": []})
            found["text"] += part.text
            found["token_ids"] += (part.model_extra or {}).get("token_ids", [])
            for name, values in (part.logprobs.model_dump() if part.logprobs else {}).items():
                found.setdefault(name, []).extend(values)
        whole = await client.completions.create(**fields)
        for choice in whole.choices:
            expected = {"text": choice.text, "token_ids": (choice.model_extra or {})["token_ids"]}
            expected |= choice.logprobs.model_dump() if choice.logprobs else {}
            assert joined[choice.index] == expected

    try:
        async with server.wait_ready().async_client() as client:
            await asyncio.gather(*(check(client, number) for number in range(40)))
        trace = server.stop_and_verify()
    finally:
        server.close()
    assert trace.of(Preempted)
    assert len({event.scheduling.kind for event in trace.of(Arrived)}) == 2


def token_ids_of(served: Server, text: str) -> list[int]:
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    reply = served.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
    return list(json.loads(reply.data)["tokens"])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_what_contradicts_a_grammar_holds_as_far_as_the_grammar_leaves_a_choice(
    served: Server, client: openai.OpenAI, temperature: float
) -> None:
    """As the page of the API says it of each."""

    def complete(structure: dict[str, Any], **fields: Any) -> tuple[str, str, int]:
        extra = {"structured_outputs": structure, **fields}
        reply = client.completions.create(
            model=served.model, prompt="x", max_tokens=30, temperature=temperature, seed=3, extra_body=extra
        )
        assert reply.usage is not None
        return reply.choices[0].text, reply.choices[0].finish_reason, reply.usage.completion_tokens

    either = {"choice": ["red", "blue"]}
    # allowed_token_ids choose among what the grammar allows; its end is none of them, and comes all the same.
    for text in ("red", "blue"):
        assert complete(either, allowed_token_ids=token_ids_of(served, text))[:2] == (text, "stop")
    assert complete(either, allowed_token_ids=token_ids_of(served, "xyz"))[0] in ("red", "blue")
    # A bad word is avoided, unless the grammar asks for it.
    for bad, left in (("red", "blue"), ("blue", "red")):
        words = [bad[:length] for length in range(1, len(bad) + 1)]
        assert complete(either, bad_words=words)[:2] == (left, "stop")
    assert complete({"choice": ["red"]}, bad_words=["red", "r", "e", "d"])[:2] == ("red", "stop")
    # min_tokens keeps a text from ending that may go on, and not one that has to end.
    text, reason, num_tokens = complete({"regex": "[ab]*"}, min_tokens=20)
    assert (re.fullmatch("[ab]+", text) is not None, reason in ("stop", "length")) == (True, True)
    assert num_tokens >= 20
    text, reason, num_tokens = complete({"choice": ["red"]}, min_tokens=20)
    assert (text, reason) == ("red", "stop")
    assert num_tokens < 20


def test_a_prefix_is_shared_by_requests_of_one_salt(served: Server, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "It was the best of times, it was the worst of times. " * 6}]

    def cached(**extra: Any) -> int | None:
        reply = client.chat.completions.create(model=served.model, messages=messages, max_tokens=1, extra_body=extra)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="a") == 0
    again = cached(cache_salt="a")
    assert again
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached() == cached(cache_salt="b") == again
