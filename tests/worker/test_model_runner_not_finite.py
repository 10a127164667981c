"""Checkpoints that compute NaN or infinity for some sequences: those end with an error, the others are undisturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from eventlm.kernels.cpu import native
from eventlm.sampling_params import SamplingParams
from eventlm.types import RequestKind
from tests.checkpoints import make_checkpoint
from tests.serving import Reply, Server, serve
from tests.worker.launches import new_sequence
from tests.worker.reference import Schedule, make_runner

#: The embedding of this token is broken, and so is every sequence that contains it.
BROKEN_ID = 77
CLEAN = list(range(10, 29))
BROKEN = [*CLEAN[:6], BROKEN_ID, *CLEAN[7:]]
FORWARDS = ["torch", *native.available_builds()]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 7, "repetition_penalty": 1.2},
    {"temperature": 0.8, "logprobs": 3},
    {"temperature": 0.0, "min_tokens": 20, "eos_token_ids": (2,)},
]


def break_token(folder: Path, value: float = torch.nan) -> Path:
    """Put `value` into the embedding of BROKEN_ID."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN_ID, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return break_token(make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16"))


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("way", WAYS)
def test_only_the_broken_sequences_end(
    checkpoint: Path, forward: str, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **way})
    runner = make_runner(checkpoint, dtype="bfloat16", block_size=16, num_blocks=8, cpu_kernels=forward)

    def serve(*prompts: list[int]) -> Schedule:
        """Each in two blocks, three decodes for those that are not over, the last with a step in flight."""
        schedule = Schedule(runner, monkeypatch)
        schedule.step(
            new=[new_sequence(number, prompt, params=params) for number, prompt in enumerate(prompts)],
            chunks=[(number, 0, 0, len(prompt), 1) for number, prompt in enumerate(prompts)],
            blocks=[(number, 0, [2 * number, 2 * number + 1]) for number in range(len(prompts))],
        )
        going_on = {key: prompts[key[0]] for key in schedule.outputs}
        schedule.decode(going_on, 2)
        schedule.decode(going_on, 1, in_flight=1)
        schedule.forget_all()
        monkeypatch.undo()
        return schedule

    alone = serve(CLEAN, CLEAN[::-1])
    assert len(alone.outputs[0, 0]) == 4
    mixed = serve(BROKEN, CLEAN[::-1], BROKEN[::-1])
    assert mixed.ends == {(0, 0): ["error"], (2, 0): ["error"]}
    assert mixed.outputs == {(1, 0): alone.outputs[1, 0]}
    # In the blocks that the broken one has left.
    again = serve(CLEAN, CLEAN[::-1])
    assert (again.outputs, again.ends) == (alone.outputs, {})


#: What a request asks for besides tokens, and whether its last chunk samples.
ASKS: list[tuple[RequestKind, SamplingParams, int]] = [
    ("pool", SamplingParams(), 0),
    ("pool", SamplingParams(pooling="mean"), 0),
    ("score", SamplingParams(), 0),
    ("score", SamplingParams(prompt_logprobs=-1), 0),
    ("generate", SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=2), 1),
    # The token that is drawn has a finite logit; what it is compared with has not.
    ("generate", SamplingParams(temperature=0.0, logprobs=2, allowed_token_ids=(40, 41)), 1),
]


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(("kind", "params", "samples"), ASKS)
def test_extras_of_broken_sequences_are_errors(
    checkpoint: Path,
    forward: str,
    kind: RequestKind,
    params: SamplingParams,
    samples: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompts come in two chunks, and what is broken is in the first."""
    runner = make_runner(checkpoint, dtype="bfloat16", block_size=16, num_blocks=8, cpu_kernels=forward)

    def serve(*prompts: list[int]) -> Schedule:
        schedule = Schedule(runner, monkeypatch)
        schedule.step(
            new=[
                structs.replace(new_sequence(number, prompt, params=params), kind=kind)
                for number, prompt in enumerate(prompts)
            ],
            chunks=[(number, 0, 0, 10, 0) for number in range(len(prompts))],
            blocks=[(number, 0, [2 * number, 2 * number + 1]) for number in range(len(prompts))],
        )
        schedule.step(
            chunks=[(number, 0, 10, len(prompt) - 10, samples) for number, prompt in enumerate(prompts)],
        )
        schedule.forget_all()
        monkeypatch.undo()
        return schedule

    alone = serve(CLEAN, CLEAN[::-1])
    assert alone.ends == {}
    mixed = serve(BROKEN, CLEAN[::-1], BROKEN[::-1])
    # The second prompt is broken in both chunks, seen from its end.
    assert {key: set(ends) for key, ends in mixed.ends.items()} == {(0, 0): {"error"}, (2, 0): {"error"}}
    assert mixed.outputs == {key: tokens for key, tokens in alone.outputs.items() if key == (1, 0)}
    assert {key: extras for key, extras in mixed.extras.items() if key == (1, 0)} == {
        (1, 0): alone.extras[1, 0],
    }


def test_a_real_server_answers_with_an_error(tmp_path: Path) -> None:
    """Also where the values are not those of tokens: an embedding, log-probabilities of the prompt."""
    folder = break_token(make_checkpoint(tmp_path / "model", dtype="bfloat16"))
    with serve(tmp_path, "--model", str(folder), "--max-num-seqs", "8", "--max-num-batched-tokens", "16") as server:
        asks: list[tuple[str, dict[str, Any]]] = [
            ("/v1/embeddings", {"input": BROKEN}),
            ("/v1/embeddings", {"input": [CLEAN, BROKEN], "pooling": "mean"}),
            ("/v1/completions", {"prompt": BROKEN, "max_tokens": 3}),
            ("/v1/completions", {"prompt": BROKEN, "max_tokens": 0, "echo": True, "logprobs": 1}),
            ("/v1/completions", {"prompt": BROKEN, "max_tokens": 3, "prompt_logprobs": 1}),
        ]
        for path, body in asks:
            reply = post(server, path, body)
            error = reply.json()["error"]
            assert (reply.status, error["type"]) == (500, "server_error"), (path, body, error)
            assert "NaN" in error["message"]
            assert reply.headers["x-should-retry"] == "false"
            whole = json.loads(json.dumps(body).replace(str(BROKEN_ID), "7"))
            assert post(server, path, whole).status == 200
    warnings = [line for line in map(json.loads, server.stderr.splitlines()) if "NaN" in line["event"]]
    assert [line["level"] for line in warnings] == ["warning"] * len(asks)


def post(server: Server, path: str, body: dict[str, Any]) -> Reply:
    content = json.dumps({"model": server.model, **body}).encode()
    return server.request("POST", path, content, {"Content-Type": "application/json"})
