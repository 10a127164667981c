"""The default model behind a real server: streams equal whole replies, parameters have their effect."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from eventlm.models.fetch.default_model import DEFAULT_MODEL
from eventlm.models.fetch.pull import cached
from eventlm.text.tokenizer import CheckpointTokenizer
from tests.models.families.proof import STABLE_BUILD
from tests.serving import Server, serve

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Translate to German: good morning, café and naïve.",
    "List three fruits:\n1.",
    "日本語で「ありがとう」は",
    "🙂 means",
)
WORDS = ("blue", "river", "seven", "music", "Über", "code", "tea", "winter", "jump", "prime")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--no-prefix-cache", "--max-model-len", "256", "--kv-memory", "64MiB", "--cpu-kernels", STABLE_BUILD]
    with serve(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> CheckpointTokenizer:
    folder = cached(DEFAULT_MODEL)
    assert folder is not None
    return CheckpointTokenizer(folder)


def check_stream(client: openai.OpenAI, number: int) -> None:
    """A random prompt under random parameters, whole and streamed, one after the other."""
    draw = random.Random(number)
    prompt = f"{' '.join(draw.sample(WORDS, 3))}\n{draw.choice(PROMPTS)}"
    fields: dict[str, Any] = {
        "model": "smollm2",
        "prompt": prompt,
        "seed": number,
        "max_tokens": 8,
        "temperature": draw.choice([0.0, 0.8, 1.5]),
        "stop": draw.choice([None, ["e"], [" the", "\n"], ["an", "in ", "."]]),
        "logprobs": draw.choice([None, 2]),
        "extra_body": {"min_tokens": draw.choice([0, 4]), "include_stop_str_in_output": draw.random() < 0.5},
    }
    whole = client.completions.create(**fields).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == whole.finish_reason
    assert chunks[-1].model_extra == {"stop_reason": whole.model_extra["stop_reason"]}  # type: ignore[index]
    joined: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in (chunk.logprobs.model_dump() if chunk.logprobs else {}).items():
            joined.setdefault(name, []).extend(values)
    assert joined == (whole.logprobs.model_dump() if whole.logprobs else {})


@pytest.mark.parametrize("number", range(4))
def test_streamed_text_is_the_whole_text(client: openai.OpenAI, number: int) -> None:
    check_stream(client, number)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(4, 50))
def test_streamed_text_is_the_whole_text_of_many(client: openai.OpenAI, number: int) -> None:
    check_stream(client, number)


def ask(client: openai.OpenAI, prompt: Any = PROMPTS[0], **fields: Any) -> Any:
    named = {"max_tokens": 6, "temperature": 0, "logprobs": 0} | fields
    known = {"max_tokens", "temperature", "logprobs", "seed", "stop", "presence_penalty", "frequency_penalty",
             "logit_bias", "n"}  # fmt: skip
    extra = {name: value for name, value in named.items() if name not in known}
    direct = {name: value for name, value in named.items() if name in known}
    return client.completions.create(model="smollm2", prompt=prompt, **direct, extra_body=extra).choices[0]


def token_id(tokenizer: CheckpointTokenizer, text: str) -> int:
    [found] = tokenizer.encode(text, add_special_tokens=False)
    return found


def test_logit_bias(client: openai.OpenAI, tokenizer: CheckpointTokenizer) -> None:
    blue, paris = token_id(tokenizer, " blue"), token_id(tokenizer, " Paris")
    assert ask(client).text.startswith(" Paris")
    assert ask(client, logit_bias={str(blue): 100}, max_tokens=3).text == " blue blue blue"
    assert "Paris" not in ask(client, logit_bias={str(paris): -100}).text


def test_allowed_token_ids(client: openai.OpenAI, tokenizer: CheckpointTokenizer) -> None:
    allowed = [token_id(tokenizer, text) for text in (" red", " green", " blue")]
    for temperature in (0, 2):
        words = ask(client, allowed_token_ids=allowed, temperature=temperature).text.split(" ")
        assert set(words[1:]) <= {"red", "green", "blue"}
        assert len(words) == 7


def test_bad_words(client: openai.OpenAI) -> None:
    assert "Paris" in ask(client).text
    text = ask(client, bad_words=["Paris", " the", "."]).text
    assert not any(word in text for word in ("Paris", " the ", "."))


def test_min_tokens_and_stops(client: openai.OpenAI, tokenizer: CheckpointTokenizer) -> None:
    whole = ask(client).logprobs.tokens
    assert whole[0] == " Paris"
    choice = ask(client, stop=[" Par"])
    assert (choice.text, choice.logprobs.tokens, choice.finish_reason) == ("", [" Paris"], "stop")
    assert choice.stop_reason == " Par"
    assert ask(client, stop=[" Par"], include_stop_str_in_output=True).text == " Par"
    # A stop string that is complete too early is text.
    assert ask(client, stop=[" Par"], min_tokens=1).text == "".join(whole)
    # A stop token that comes too early is not drawn at all.
    paris = token_id(tokenizer, " Paris")
    stopped = ask(client, stop_token_ids=[paris])
    assert (stopped.text, stopped.stop_reason, stopped.logprobs.tokens) == ("", paris, [" Paris"])
    assert ask(client, stop_token_ids=[paris], include_stop_str_in_output=True).text == " Paris"
    later = ask(client, stop_token_ids=[paris], min_tokens=3)
    assert " Paris" not in later.logprobs.tokens[:3]
    assert len(later.logprobs.tokens) >= 3


def test_penalties(client: openai.OpenAI) -> None:
    prompt = "one one one one one one one one"
    plain = ask(client, prompt).logprobs.tokens
    assert len(set(plain)) < len(plain)
    fresh = ask(client, prompt, repetition_penalty=100.0).logprobs.tokens
    assert len({*fresh, " one"}) == len(fresh) + 1
    both = ask(client, prompt, presence_penalty=2.0, frequency_penalty=2.0).logprobs.tokens
    # Of the output's own tokens only: the first is what it was.
    assert both[0] == plain[0]
    assert both != plain


def test_min_p_leaves_only_what_is_likely(client: openai.OpenAI) -> None:
    greedy = ask(client).text
    assert ask(client, temperature=2, min_p=1.0, seed=3).text == greedy
    assert ask(client, temperature=2, seed=3).text != greedy


def test_logprobs_of_prompt_and_output_are_the_same_model_s(
    client: openai.OpenAI, tokenizer: CheckpointTokenizer
) -> None:
    choice = ask(client, logprobs=3, max_tokens=4)
    logprobs = choice.logprobs
    assert [max(top, key=top.__getitem__) for top in logprobs.top_logprobs] == logprobs.tokens
    assert logprobs.text_offset == [0, *(len("".join(logprobs.tokens[:end])) for end in range(1, 4))]
    # The same tokens as a prompt have the same log-probabilities.
    prompt = tokenizer.encode(PROMPTS[0], add_special_tokens=True)
    prompt += [token_id(tokenizer, token) for token in logprobs.tokens]
    again = ask(client, prompt, prompt_logprobs=3, max_tokens=1)
    entries = again.prompt_logprobs
    assert entries[0] is None
    own = [next(iter(entry.values())) for entry in entries[1:]]
    assert [entry["decoded_token"] for entry in own[-4:]] == logprobs.tokens
    assert [entry["logprob"] for entry in own[-4:]] == pytest.approx(logprobs.token_logprobs, abs=1e-3)
    assert [entry["rank"] for entry in own[-4:]] == [1] * 4
    assert all(len(entry) in (3, 4) for entry in entries[1:])


def test_chat_logprobs_parse(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Say hello."}], temperature=0, max_tokens=4,
        logprobs=True, top_logprobs=5,
    )  # fmt: skip
    choice = reply.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
