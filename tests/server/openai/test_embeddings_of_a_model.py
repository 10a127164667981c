"""Embeddings of a real server are those of transformers, in float32, however the prompts were cut and cached."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from eventlm.text.tokenizer import CheckpointTokenizer
from tests.checkpoints import make_checkpoint
from tests.serving import Server, serve

TEXTS = ["The quick brown fox", "It was the best of times, it was", "In the beginning " * 12, "a"]
HIDDEN_SIZE = 64
#: What float32 sums in another order differ by, of numbers up to 1.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    """Chunks smaller than the long text, blocks small enough to be hit, and too few of them for all that runs."""
    flags = ["--model", str(folder), "--num-blocks", "64", "--block-size", "4", "--max-num-batched-tokens", "16"]
    flags += ["--max-num-seqs", "12", "--max-model-len", "200", "--dtype", "float32"]
    with serve(tmp_path_factory.mktemp("server"), *flags, check_invariants=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """By text and pooling, as the model gives them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = CheckpointTokenizer(folder)
    found = {}
    for text in TEXTS:
        with torch.inference_mode():
            token_ids = tokenizer.encode(text, add_special_tokens=True)
            [hidden_TH] = model.model(torch.tensor([token_ids])).last_hidden_state
        found[text, "last"] = hidden_TH[-1]
        found[text, "mean"] = hidden_TH.mean(dim=0)
    return found


def unit(vector: torch.Tensor) -> list[float]:
    return list((vector / vector.norm()).tolist())


def embed(client: openai.OpenAI, server: Server, **fields: Any) -> list[list[float]]:
    reply = client.embeddings.create(model=server.model, **{"input": TEXTS, **fields})
    return [each.embedding for each in reply.data]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(
    client: openai.OpenAI, server: Server, expected: dict[tuple[str, str], torch.Tensor], pooling: str
) -> None:
    """Twice: the second time the prefix cache has all of the prompts."""
    for _ in range(2):
        found = embed(client, server, extra_body={"pooling": pooling})
        for vector, text in zip(found, TEXTS, strict=True):
            assert vector == pytest.approx(unit(expected[text, pooling]), abs=CLOSE), text


def test_dimensions_and_raw_values(
    client: openai.OpenAI, server: Server, expected: dict[tuple[str, str], torch.Tensor]
) -> None:
    for vector, text in zip(embed(client, server, dimensions=10), TEXTS, strict=True):
        assert vector == pytest.approx(unit(expected[text, "last"][:10]), abs=CLOSE)
    [raw] = embed(client, server, input="a", encoding_format="base64", extra_body={"normalize": False})
    values = struct.unpack(f"<{HIDDEN_SIZE}f", base64.b64decode(str(raw)))
    assert values == pytest.approx(expected["a", "last"].tolist(), abs=1e-4)
    with pytest.raises(openai.BadRequestError) as caught:
        embed(client, server, dimensions=HIDDEN_SIZE + 1)
    assert caught.value.param == "dimensions"


def test_beside_generations_that_take_the_blocks(
    client: openai.OpenAI, server: Server, expected: dict[tuple[str, str], torch.Tensor]
) -> None:
    """Prompts are preempted and computed again; what comes out is the same."""
    names = ["last", "mean"] * 6
    with ThreadPoolExecutor(16) as pool:
        generations = [
            pool.submit(
                client.completions.create,
                model=server.model,
                prompt=text,
                max_tokens=60,
                extra_body={"ignore_eos": True},
            )
            for text in TEXTS * 2
        ]
        found = list(
            pool.map(lambda pooling: embed(client, server, extra_body={"pooling": pooling, "priority": 1}), names)
        )
        assert all(each.result().usage.completion_tokens == 60 for each in generations)
    for vectors, pooling in zip(found, names, strict=True):
        for vector, text in zip(vectors, TEXTS, strict=True):
            assert vector == pytest.approx(unit(expected[text, pooling]), abs=CLOSE)


def test_as_many_inputs_as_openai_takes_with_the_default_options(tmp_path: Path) -> None:
    """They are admitted as one, and all of them are embedded, in their order."""
    server = Server(tmp_path, "--model", "fake")
    inputs = [[number % 1000, 1] for number in range(2048)]
    try:
        with server.wait_ready().client() as client:
            reply = client.embeddings.create(model="fake", input=inputs)
            assert [each.index for each in reply.data] == list(range(2048))
            assert reply.usage.prompt_tokens == 4096
            assert (
                reply.data[1500].embedding == client.embeddings.create(model="fake", input=[500, 1]).data[0].embedding
            )
        server.stop_and_verify()
    finally:
        server.close()
