"""vLLM's parameters that reach the workers, through the openai client and a real server over a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.checkpoints import BOS_ID, PAD_ID, SPECIAL_TOKENS, make_checkpoint
from tests.serving import Server, serve

#: In place of two special tokens that the tokenizer never writes itself.
MARKS = {"<|bos|>": "<think>", "<|pad|>": "</think>"}
THINK, UNTHINK = BOS_ID, PAD_ID
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
#: A template that opens the reasoning.
THINKING = "{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}\n<think>\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        rename(checkpoint / name)
    flags = ["--dtype", "float32", "--reasoning-parser", "qwen3", "--trust-request-chat-template", "--num-blocks", "64"]
    with serve(tmp_path_factory.mktemp("server"), "--model", str(checkpoint), *flags) as server:
        yield server


def rename(path: Path) -> None:
    text = path.read_text()
    for old, new in MARKS.items():
        assert old in SPECIAL_TOKENS
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_log_probabilities_of_named_tokens(server: Server, client: openai.OpenAI) -> None:
    named = [9, 200, 31]
    fields: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 6}
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}

    def entries(**more: Any) -> Any:
        reply = client.chat.completions.create(**fields, logprobs=True, extra_body=extra | more)
        return reply.choices[0].logprobs.content, reply.choices[0].model_extra["token_ids"]

    found, token_ids = entries(logprob_token_ids=named)
    assert len(found) == len(token_ids) == 6
    for entry, token_id in zip(found, token_ids, strict=True):
        listed = {int(top.token.removeprefix("token_id:")): top.logprob for top in entry.top_logprobs}
        assert [*listed] == list(dict.fromkeys([token_id, *named]))
        assert listed[token_id] == entry.logprob
    # The same numbers as the prompt's log-probabilities of the same tokens in the same place.
    [choice] = client.completions.create(
        model=server.model,
        prompt="What",
        max_tokens=1,
        temperature=0,
        logprobs=20,
        extra_body={"logprob_token_ids": named, "return_tokens_as_token_ids": True, "return_token_ids": True},
    ).choices
    extras = choice.model_extra or {}
    scored = client.completions.create(
        model=server.model,
        prompt=[[*extras["prompt_token_ids"], token_id] for token_id in named],
        max_tokens=0,
        echo=True,
        logprobs=0,
    ).choices
    assert choice.logprobs is not None
    top = (choice.logprobs.top_logprobs or [{}])[0]
    for token_id, other in zip(named, scored, strict=True):
        assert other.logprobs is not None
        assert top[f"token_id:{token_id}"] == pytest.approx((other.logprobs.token_logprobs or [])[-1], abs=1e-4)


@pytest.mark.parametrize("budget", [0, 1, 9])
@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_of_reasoning(server: Server, client: openai.OpenAI, budget: int, stream: bool) -> None:
    fields: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    extra = {"chat_template": THINKING, "thinking_token_budget": budget, "return_token_ids": True}
    if stream:
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(**fields, stream=True, stream_options=options, extra_body=extra))
        usage = chunks[-1].usage
        choices = [choice for chunk in chunks for choice in chunk.choices]
        token_ids = [each for choice in choices for each in (choice.model_extra or {}).get("token_ids", ())]
        message = "".join(choice.delta.content or "" for choice in choices)
    else:
        reply = client.chat.completions.create(**fields, extra_body=extra)
        usage = reply.usage
        token_ids = (reply.choices[0].model_extra or {})["token_ids"]
        message = reply.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert token_ids.index(UNTHINK) == usage.completion_tokens_details.reasoning_tokens == budget
    assert len(token_ids) == 24
    assert message
    # Without one such a model goes on for ever.
    if budget:
        plain = client.chat.completions.create(**fields, extra_body=extra | {"thinking_token_budget": -1})
        assert (plain.choices[0].model_extra or {})["token_ids"][:budget] == token_ids[:budget]


def test_a_budget_before_a_structure(server: Server, client: openai.OpenAI) -> None:
    extra = {
        "chat_template": THINKING, "thinking_token_budget": 5, "structured_outputs": {"choice": ["Paris", "Bern"]},
        "return_token_ids": True,
    }  # fmt: skip
    for seed in range(4):
        reply = client.chat.completions.create(
            model=server.model, messages=MESSAGES, seed=seed, max_tokens=40, extra_body=extra
        )
        [choice] = reply.choices
        assert choice.message.content.strip() in ("Paris", "Bern")
        assert (choice.model_extra or {})["token_ids"].index(UNTHINK) <= 5
        assert choice.finish_reason == "stop"


def test_what_may_come_and_what_ends_it(server: Server, client: openai.OpenAI) -> None:
    """In a reply of eight tokens of the vocabulary's byte `A` or `B`, and special ones, as they are asked for."""

    def complete(**extra: Any) -> Any:
        fields = {"ignore_eos": True, "return_token_ids": True, "seed": 3} | extra
        [choice] = client.completions.create(
            model=server.model, prompt="What is", max_tokens=8, extra_body=fields
        ).choices
        assert choice.model_extra is not None
        return choice, choice.model_extra["token_ids"]

    tokens = client.completions.create(
        model=server.model, prompt="A", max_tokens=1, extra_body={"return_token_ids": True}
    )
    [letter] = (tokens.choices[0].model_extra or {})["prompt_token_ids"]
    other = letter + 1
    choice, token_ids = complete(allowed_token_ids=[letter])
    assert (choice.text, token_ids) == ("A" * 8, [letter] * 8)
    choice, token_ids = complete(allowed_token_ids=[letter, other], bad_words=["A"])
    assert (choice.text, token_ids) == ("B" * 8, [other] * 8)
    choice, token_ids = complete(allowed_token_ids=[letter], stop_token_ids=[letter])
    assert (choice.text, token_ids, choice.finish_reason) == ("", [letter], "stop")
    assert choice.model_extra["stop_reason"] == letter
    # The first of the text: none may end it before the fourth token.
    choice, token_ids = complete(allowed_token_ids=[letter, other], stop_token_ids=[letter], min_tokens=3)
    assert token_ids[:3] == [other] * 3
    choice, _ = complete(allowed_token_ids=[letter], stop="AAA")
    assert (choice.text, choice.model_extra["stop_reason"]) == ("", "AAA")
    choice, _ = complete(allowed_token_ids=[letter], stop="AAA", include_stop_str_in_output=True)
    assert choice.text == "AAA"
    # Special tokens have a text where it is asked for, and nothing between them.
    for spaces in ({}, {"spaces_between_special_tokens": False}, {"spaces_between_special_tokens": True}):
        choice, _ = complete(allowed_token_ids=[UNTHINK], skip_special_tokens=False, **spaces)
        assert choice.text == "</think>" * 8
        assert complete(allowed_token_ids=[UNTHINK], **spaces)[0].text == ""


def test_the_run_replays(server: Server) -> None:
    """Last: grammars of budgets and named tokens change nothing of that."""
    server.stop_and_verify()
