"""`echo`: the prompt in front of its completion, its tokens scored, streamed or not; nothing generated if so asked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import openai
import pytest

from eventlm.text.echo import echo_of_text, echo_of_tokens
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.tokenizer import CheckpointTokenizer, Tokenizer
from tests.server.checkpoints import CORPUS, byte_fallback, byte_level
from tests.server.conftest import RunningServer

BOS = "<|bos|>"


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, None], ids=["byte-level", "byte-fallback", "fake"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param is None:
        return FakeTokenizer()
    return CheckpointTokenizer(request.param(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def client(server: RunningServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def texts() -> list[str]:
    rng = random.Random(5)
    found = ["x", " x", "naïve 日本語🙂!", "two words", "\n\n", "<s>x</s>", "<|im_start|>user", " "]
    return found + [CORPUS[number][rng.randrange(9) : rng.randrange(10, 40)] for number in range(60)]


def test_offsets_point_at_the_tokens_of_a_text(tokenizer: Tokenizer) -> None:
    for text in texts():
        for add_special_tokens in (True, False):
            token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            echo = echo_of_text(tokenizer, text, token_ids)
            assert (echo.text, echo.token_ids) == (text, token_ids)
            assert "".join(echo.part(index, index + 1).text for index in range(len(token_ids))) == text
            plain = tokenizer.encode(text, add_special_tokens=False)
            added = len(token_ids) - len(plain)
            assert echo.text_offset[:added] == [0] * added
            spelled = b"".join(map(tokenizer.raw_token_bytes, plain)).decode()
            if spelled not in (text, " " + text):
                # Some put a space behind each special token.
                assert "<" in text
                assert spelled.replace(" ", "") == text
                continue
            for index, token_id in enumerate(plain, start=added):
                piece = tokenizer.raw_token_bytes(token_id).decode(errors="replace")
                shown = echo.part(index, index + 1).text
                # A character in pieces belongs to the last of them; the tokenizer's own space is not shown.
                own_space = index == added and spelled != text
                assert shown == piece or "\ufffd" in piece or (own_space and " " + shown == piece)


def test_tokens_are_shown_with_the_special_ones(tokenizer: Tokenizer) -> None:
    rng = random.Random(6)
    for _ in range(30):
        token_ids = rng.choices(range(tokenizer.vocab_size), k=rng.randrange(1, 20))
        echo = echo_of_tokens(tokenizer, token_ids)
        data = b"".join(map(tokenizer.raw_token_bytes, token_ids))
        assert echo.text == data.decode(errors="replace")
        cut = rng.randrange(len(token_ids) + 1)
        assert echo.part(0, cut).text + echo.part(cut, len(token_ids)).text == echo.text


def test_a_rewritten_text_keeps_its_offsets_within(tmp_path: Path) -> None:
    """A tokenizer in lower case spells another text, here a longer one."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import normalizers

    folder = byte_level(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Replace("é", "eeee")
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = CheckpointTokenizer(folder)
    text = "café é"
    echo = echo_of_text(tokenizer, text, tokenizer.encode(text, add_special_tokens=True))
    assert echo.text == text
    assert echo.text_offset == sorted(echo.text_offset)
    assert max(echo.text_offset) <= len(text)


@pytest.mark.parametrize(("prompt", "shown"), [(["né", "x"], ["né", "x"]), ([[256, 104], [1023]], [f"{BOS}h", " Ω"])])
def test_text(server: RunningServer, client: openai.OpenAI, prompt: Any, shown: list[str]) -> None:
    """As it was sent, or as what the tokens stand for."""
    fields: Any = {"model": "test", "prompt": prompt, "echo": True, "n": 2}
    whole = client.completions.create(**fields)
    assert [choice.text for choice in whole.choices] == [f"{shown[index]}Hello, world" for index in (0, 0, 1, 1)]
    assert [choice.logprobs for choice in whole.choices] == [None] * 4
    joined = [""] * 4
    for chunk in client.completions.create(**fields, stream=True):
        [choice] = chunk.choices
        joined[choice.index] += choice.text
    assert joined == [choice.text for choice in whole.choices]
    assert [request.sampling.prompt_logprobs for request in server.engine.requests] == [None] * 4
    assert [request.scheduling.skip_cache_read for request in server.engine.requests] == [False] * 4


def test_log_probabilities(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.script = lambda request, index: [[*"é!".encode()]]
    [choice] = client.completions.create(model="test", prompt="hé 🙂", echo=True, logprobs=2).choices
    assert choice.text == "hé 🙂é!"
    logprobs = choice.logprobs
    assert logprobs is not None
    cut = "\ufffd"
    assert logprobs.tokens == [BOS, "h", cut, cut, " ", cut, cut, cut, cut, cut, cut, "!"]
    ids = [256, *"hé 🙂é!".encode()]
    assert logprobs.token_logprobs == [None, *(-token_id / 100 for token_id in ids[1:])]
    assert logprobs.text_offset == [0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 4, 5]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[:2] == [None, {"h": -1.04, " ": -0.32, "!": -0.33}]
    [request] = server.engine.requests
    assert (request.sampling.prompt_logprobs, request.scheduling.skip_cache_read, request.scheduling.kind) == (
        2,
        True,
        "generate",
    )


def test_the_most_likely_of_tokens_that_look_alike_stands_for_them(server: RunningServer) -> None:
    """Else a reader would take a token for the most likely one that is not."""
    server.engine.script = lambda request, index: [[200]]
    fields: Any = {"prompt": [200, 201], "echo": True}
    logprobs = server.complete(**fields, logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [None, {"\ufffd": -2.01, " ": -0.32}, {"\ufffd": -2.0, " ": -0.32}]
    logprobs = server.complete(**fields, logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:200", "token_id:201", "token_id:200"]
    assert logprobs["top_logprobs"][1] == {"token_id:201": -2.01, "token_id:32": -0.32}


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_as_harnesses_ask_for_loglikelihoods(server: RunningServer, client: openai.OpenAI, max_tokens: int) -> None:
    prompts = [[104, 101, 108, 108, 111, 33, 33], [97], [98, 99]]
    whole = client.completions.create(
        model="test", prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234,
        stop=["x"],
    )  # fmt: skip
    generated = [72][:max_tokens]
    for choice, prompt in zip(whole.choices, prompts, strict=True):
        assert choice.logprobs is not None
        assert choice.text == bytes([*prompt, *generated]).decode()
        expected = [None, *(-token_id / 100 for token_id in [*prompt[1:], *generated])]
        assert choice.logprobs.token_logprobs == expected
        assert choice.logprobs.text_offset == list(range(len(prompt) + max_tokens))
        assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 3 * max_tokens)
    kinds = {
        (request.scheduling.kind, request.sampling.max_tokens, request.scheduling.has_text_ends)
        for request in server.engine.requests
    }
    assert kinds == {("generate", 1, True) if max_tokens else ("score", None, False)}


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_streamed_parts_join_to_the_whole(
    server: RunningServer, client: openai.OpenAI, logprobs: int | None, max_tokens: int
) -> None:
    fields: Any = {
        "model": "test", "prompt": ["hello 🙂 there", "x"], "n": 2, "echo": True, "logprobs": logprobs,
        "max_tokens": max_tokens, "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole = client.completions.create(**fields)
    joined: list[dict[str, Any]] = [{"text": "", "ids": []} for _ in range(4)]
    for chunk in client.completions.create(**fields, stream=True):
        [part] = chunk.choices
        found = joined[part.index]
        found["text"] += part.text
        found["finish_reason"] = part.finish_reason
        extra = part.model_extra or {}
        found["ids"] += extra.get("token_ids", [])
        found.setdefault("prompt_ids", extra.get("prompt_token_ids"))
        for name, values in (part.logprobs.model_dump() if part.logprobs else {}).items():
            found.setdefault(name, []).extend(values)
    for choice, found in zip(whole.choices, joined, strict=True):
        assert choice.text == found["text"]
        assert (choice.model_extra or {})["token_ids"] == found["ids"] == [*b"Hello"][:max_tokens]
        assert (choice.model_extra or {})["prompt_token_ids"] == found["prompt_ids"]
        assert found["finish_reason"] == "length"
        if logprobs is None:
            assert choice.logprobs is None
        else:
            assert choice.logprobs is not None
            assert choice.logprobs.model_dump() == {name: found[name] for name in choice.logprobs.model_dump()}
            assert len(found["tokens"]) == len(found["prompt_ids"]) + max_tokens


def test_with_prompt_logprobs_and_a_cut_prompt(server: RunningServer) -> None:
    """Both views of the prompt have as many alternatives as each was asked for."""
    for both in ((1, 3), (3, 1), (None, 2)):
        num_top, num_prompt_top = both
        fields = {"logprobs": num_top, "prompt_logprobs": num_prompt_top}
        [choice] = server.complete(prompt="hello", echo=True, truncate_prompt_tokens=3, **fields).json()["choices"]
        assert choice["text"] == "lloHello, world"
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1 + num_prompt_top] * 2
        if num_top is not None:
            assert [len(entry) for entry in choice["logprobs"]["top_logprobs"][1:3]] == [1 + num_top] * 2
    assert server.engine.requests[0].prompt_token_ids == [*b"llo"]
